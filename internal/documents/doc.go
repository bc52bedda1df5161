// Package documents tests what the project's documents say: their links lead somewhere, their
// programs run, the tests and errors that they name exist, a program links only what they
// list, and all texts avoid phrases that readers had to read twice. It has tests only.
package documents
