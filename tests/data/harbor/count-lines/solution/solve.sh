#!/bin/bash
wc -l < poem.txt > answer.txt
