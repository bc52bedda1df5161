// Package sqltest tests the SQL functions of package migrations as a program in
// any language calls them: several sessions, open transactions, every isolation
// level, crashes and failovers. It has tests only.
package sqltest
