package pgxlock

import (
	"embed"
	"strings"

	"github.com/jackc/pgx/v5"
)

//go:embed sql/*.sql
var sqlFiles embed.FS

// schemaMarker stands in the files of sql/ before every object of ours. It is a
// comment, so that psql runs the files as they are.
const schemaMarker = "/* schema */"

// statement returns the statement in sql/name.sql, with our objects qualified by
// the schema.
func statement(name, schema string) string {
	text, err := sqlFiles.ReadFile("sql/" + name + ".sql")
	if err != nil {
		panic("pgxlock: " + err.Error()) // a name that this program misspelt
	}
	return strings.ReplaceAll(string(text), schemaMarker, pgx.Identifier{schema}.Sanitize()+".")
}
