#!/bin/bash
echo "$ANSWER" > report.txt
echo gone > kept.txt
