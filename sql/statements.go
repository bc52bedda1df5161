// Package statements holds every statement that the package sends, one in a file, in a
// directory for each part of the package that sends it. psql runs the files as they are.
//
// It exports a name for each file: the list of them is the point of the package.
package statements

import (
	"embed"
	"io/fs"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
)

//go:embed */*.sql
var files embed.FS

// schemaMarker stands in the files before each object of ours. It is a comment, so that
// psql runs the files as they are.
const schemaMarker = "/* schema */"

// Text returns the statement with the names of our objects unqualified.
func (n Name) Text() string { return n.In("") }

// In returns the statement with the names of our objects qualified by the schema; by none
// for "".
func (n Name) In(schema string) string {
	parts, found := texts()[n]
	if !found {
		panic("pgxlock: there is no sql/" + string(n) + ".sql")
	}
	if schema != "" {
		schema = pgx.Identifier{schema}.Sanitize() + "."
	}
	return strings.Join(parts, schema)
}

// texts holds the files, cut where the schema goes.
var texts = sync.OnceValue(func() map[Name][]string {
	paths, err := fs.Glob(files, "*/*.sql")
	if err != nil {
		panic("pgxlock: " + err.Error())
	}
	texts := make(map[Name][]string, len(paths))
	for _, path := range paths {
		text, err := files.ReadFile(path)
		if err != nil {
			panic("pgxlock: " + err.Error())
		}
		texts[Name(strings.TrimSuffix(path, ".sql"))] = strings.Split(string(text), schemaMarker)
	}
	return texts
})
