// Package browsertest tests the page of pgxlock serve in a real browser. It is a module of
// its own, for a program that locks must not depend on one that drives browsers.
package browsertest
