// Package formats gives the migrations the names and marks that other migration
// tools look for. What is run is the text of package migrations, byte for byte;
// around it stands what the tool needs, and what leads into a schema.
package formats

import (
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/migrations"
)

// A Format says whom the files are for.
type Format string

// The formats.
const (
	Plain   Format = "plain"   // psql: all versions in one file, for one direction
	Migrate Format = "migrate" // golang-migrate
	Goose   Format = "goose"
	Flyway  Format = "flyway"
	Tern    Format = "tern"
)

// All are the formats that there are.
var All = []Format{Plain, Migrate, Goose, Flyway, Tern}

// Options say what the files contain.
type Options struct {
	Schema string // they install into it, and create it; "": the search_path's first
	From   uint   // the oldest version; 0: all of them
	Number uint64 // of the first file, from which they count on; 0: that of its version
	Down   bool   // of Plain: what removes pgxlock. The other formats have both ways
}

// A File is one of them.
type File struct{ Name, Text string }

//go:embed save.sql
var saveSQL string

//go:embed create.sql
var createSQL string

//go:embed into.sql
var intoSQL string

//go:embed restore.sql
var restoreSQL string

// Files returns the files, in the order in which they are to be run.
func Files(format Format, o Options) ([]File, error) {
	if err := o.check(format); err != nil {
		return nil, err
	}
	versions, err := versionsFrom(o.From)
	if err != nil {
		return nil, err
	}
	if format == Plain {
		return []File{o.plain(versions)}, nil
	}
	var files []File
	for i, v := range versions {
		number := uint64(v.number)
		if o.Number > 0 {
			number = o.Number + uint64(i)
		}
		// golang-migrate writes its mark in a transaction of its own; in that of the
		// others, what the file sets would be set for what they write.
		shared := format != Migrate
		up, down := o.around(shared, true, v.up), o.around(shared, false, v.down)
		files = append(files, layout[format](number, "pgxlock_"+v.name, up, down)...)
	}
	return files, nil
}

func (o Options) check(format Format) error {
	switch {
	case !slices.Contains(All, format):
		return fmt.Errorf("there is no format %q", format)
	case o.Down && format != Plain:
		return fmt.Errorf("the files of %s have both ways, up and down", format)
	case o.Number > 0 && format == Plain:
		return errors.New("what psql runs has no number")
	case o.Number > 1<<62:
		return errors.New("no tool counts that far")
	}
	if err := place.CheckName(o.Schema); err != nil {
		return fmt.Errorf("the schema %.80q %w", o.Schema, err)
	}
	// Some tools replace ${...} and {{...}}, and read lines.
	if bad := strings.IndexFunc(o.Schema, func(r rune) bool { return strings.ContainsRune(`$\{}`, r) || !unicode.IsPrint(r) }); bad >= 0 {
		return fmt.Errorf("the schema %.80q has a character that a migration tool may take for its own", o.Schema)
	}
	return nil
}

// layout makes the files of one version.
var layout = map[Format]func(number uint64, name string, up, down []string) []File{
	Migrate: func(number uint64, name string, up, down []string) []File {
		stem := fmt.Sprintf("%06d_%s", number, name)
		return []File{{stem + ".up.sql", strings.Join(up, "\n")}, {stem + ".down.sql", strings.Join(down, "\n")}}
	},
	Goose: func(number uint64, name string, up, down []string) []File {
		return []File{{fmt.Sprintf("%05d_%s.sql", number, name), "-- +goose Up\n" + gooseStatements(up) + "\n-- +goose Down\n" + gooseStatements(down)}}
	},
	Flyway: func(number uint64, name string, up, down []string) []File {
		return []File{
			{fmt.Sprintf("V%d__%s.sql", number, name), strings.Join(up, "\n")},
			{fmt.Sprintf("U%d__%s.sql", number, name), strings.Join(down, "\n")},
		}
	},
	Tern: func(number uint64, name string, up, down []string) []File {
		text := strings.Join(up, "\n") + "\n---- create above / drop below ----\n\n" + strings.Join(down, "\n")
		return []File{{fmt.Sprintf("%03d_%s.sql", number, name), strings.ReplaceAll(text, "{{", `{{"{{"}}`)}} // to tern it is a template
	},
}

// gooseStatements keeps goose from cutting them at each semicolon.
func gooseStatements(statements []string) string {
	var b strings.Builder
	for _, s := range statements {
		b.WriteString("-- +goose StatementBegin\n" + s + "-- +goose StatementEnd\n")
	}
	return b.String()
}

// plain is all versions for psql.
func (o Options) plain(versions []version) File {
	var texts []string
	for _, v := range versions {
		if o.Down {
			texts = append([]string{"-- " + v.downFile + "\n" + v.down}, texts...)
		} else {
			texts = append(texts, "-- "+v.upFile+"\n"+v.up)
		}
	}
	all := strings.Join(texts, "")
	if o.Down {
		return File{"pgxlock.down.sql", strings.Join(o.around(false, false, all), "\n")}
	}
	return File{"pgxlock.up.sql", strings.Join(o.around(false, true, all), "\n")}
}

// around returns the statements of a text and those that belong around it.
func (o Options) around(shared, up bool, text string) []string {
	var before []string
	if o.Schema != "" {
		if up {
			before = append(before, o.in(createSQL))
		}
		before = append(before, o.in(intoSQL))
	}
	if before == nil && !shared {
		return []string{text}
	}
	return append(append([]string{saveSQL}, before...), text, restoreSQL)
}

// in writes the schema's name where the markers are.
func (o Options) in(text string) string {
	name := pgx.Identifier{o.Schema}.Sanitize()
	return strings.NewReplacer("/* schema */", name, "/* literal */", "'"+strings.ReplaceAll(name, "'", "''")+"'").Replace(text)
}

// version is one of those that package migrations has.
type version struct {
	number           uint
	name             string
	upFile, downFile string
	up, down         string
}

func versionsFrom(from uint) (versions []version, err error) {
	names, err := fs.Glob(migrations.FS, "*.up.sql") // sorted
	if err != nil {
		return nil, err
	}
	newest := uint(0)
	for _, file := range names {
		stem := strings.TrimSuffix(file, ".up.sql")
		digits, name, _ := strings.Cut(stem, "_")
		number, err := strconv.ParseUint(digits, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		newest = max(newest, uint(number))
		v := version{number: uint(number), name: name, upFile: file, downFile: stem + ".down.sql"}
		up, upErr := fs.ReadFile(migrations.FS, v.upFile)
		down, downErr := fs.ReadFile(migrations.FS, v.downFile)
		if err := errors.Join(upErr, downErr); err != nil {
			return nil, err
		}
		if v.up, v.down = string(up), string(down); v.number >= from {
			versions = append(versions, v)
		}
	}
	if len(versions) == 0 {
		return nil, fmt.Errorf("there is no version %d: the newest is %d", from, newest)
	}
	return versions, nil
}
