module.exports = (n) => 2 * n;
