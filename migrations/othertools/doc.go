// Package othertools tests that the files which "pgxlock migrate sql" writes
// for other migration tools do what migrations.Up does. It runs those tools, and
// so it is a module of its own.
package othertools
