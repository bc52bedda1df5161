package place

import _ "embed"

// MissingSQL returns a row for each table, view, sequence and function that a version
// has and a schema lacks, such as "table pgxlock_waiters". $1 is the schema, $2 the version.
//
//go:embed missing.sql
var MissingSQL string
