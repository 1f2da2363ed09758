package main

import "fmt"

func main() {
	fmt.Println(double(2))
}

func double(n int) int { return 2 * n }
