package pgxlock

import (
	"embed"
	"io/fs"
	"path"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
)

//go:embed sql/*.sql
var sqlFiles embed.FS

// schemaMarker stands in the files of sql/ before every object of ours. It is a
// comment, so that psql runs the files as they are.
const schemaMarker = "/* schema */"

// statement returns the statement in sql/name.sql, with our objects qualified by
// the schema, or not at all for "".
func statement(name, schema string) string {
	parts, found := statements()[name]
	if !found {
		panic("pgxlock: there is no sql/" + name + ".sql") // a name that this program misspelt
	}
	if schema != "" {
		schema = pgx.Identifier{schema}.Sanitize() + "."
	}
	return strings.Join(parts, schema)
}

// statements are the files of sql/ by their names, cut where the schema goes.
var statements = sync.OnceValue(func() map[string][]string {
	files, err := fs.Glob(sqlFiles, "sql/*.sql")
	if err != nil {
		panic("pgxlock: " + err.Error())
	}
	texts := make(map[string][]string, len(files))
	for _, file := range files {
		text, err := sqlFiles.ReadFile(file)
		if err != nil {
			panic("pgxlock: " + err.Error())
		}
		texts[strings.TrimSuffix(path.Base(file), ".sql")] = strings.Split(string(text), schemaMarker)
	}
	return texts
})
