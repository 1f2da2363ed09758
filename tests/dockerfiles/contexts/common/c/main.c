#include <stdio.h>

int main(void) {
    puts("4");
    return 0;
}
