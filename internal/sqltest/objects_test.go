package sqltest_test

import (
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

var update = flag.Bool("update", false, "write docs/sql-objects.md from the catalog, instead of comparing the two")

// object is what the migrations make: a function, a table, a view or a sequence.
type object struct {
	Kind       string // function, or as GRANT has it: table, view, sequence
	Name       string
	Comment    string
	Definition string   // of a function or a view
	Definer    bool     // of a function once hardened: it runs with its owner's rights
	Unlogged   bool     // of a table
	May        []string // once hardened: kinds of roles that may call the function, or read the rest
	Otherwise  []string // as installed: what each kind of role may do with it, such as "application SEINUPDE"
}

// objects returns all objects of an installed schema, hardened, by their names.
func objects(t *testing.T) []object {
	t.Helper()
	d := installAsIs(t)
	d.want("(select string_agg(proname, ' ') from pg_proc where prosecdef and pronamespace = current_schema()::regnamespace)", "pgxlock_next_tokens")
	d.do("select harden_locks()")
	rows, err := d.conn.Query(t.Context(), `
		with object as (
		  select 'function' as kind, p.proname::text as name, obj_description(p.oid, 'pg_proc') as comment, pg_get_functiondef(p.oid) as definition,
		         p.prosecdef as definer, false as unlogged, array(select distinct k from pgxlock_rights() g, unnest(g.kinds) k
		           where g.privileges = 'EXECUTE' and to_regprocedure(substr(g.object, 10)) = p.oid) as may, '{}'::text[] as otherwise
		    from pg_proc p where p.pronamespace = current_schema()::regnamespace
		  union all
		  select case c.relkind when 'r' then 'table' when 'v' then 'view' else 'sequence' end, c.relname, obj_description(c.oid, 'pg_class'),
		         case c.relkind when 'v' then pg_get_viewdef(c.oid) else '' end, false, c.relpersistence = 'u',
		         array(select distinct k from pgxlock_rights() g, unnest(g.kinds) k where split_part(g.object, ' ', 2) = c.relname and g.hardened is null),
		         array(select k || ' ' || string_agg(left(p, 2), '')
		                 from pgxlock_rights() g, unnest(g.kinds) k, string_to_array(g.privileges, ', ') as s (all_of), unnest(s.all_of) p
		                where split_part(g.object, ' ', 2) = c.relname and g.hardened is not true group by k order by k collate "C")
		    from pg_class c where c.relnamespace = current_schema()::regnamespace and c.relkind in ('r', 'v', 'S'))
		select * from object order by kind = 'sequence', kind collate "C", name collate "C"`)
	if err != nil {
		t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[object])
	if err != nil {
		t.Fatal(err)
	}
	if len(found) < 100 {
		t.Fatalf("%d objects", len(found))
	}
	for i := range found {
		found[i].Definition = withoutComments.ReplaceAllString(found[i].Definition, "")
	}
	return found
}

var withoutComments = regexp.MustCompile(`--[^\n]*`)

// mentioned says whether a text has that name, whole.
func mentioned(text, name string) bool {
	for at := 0; ; {
		i := strings.Index(text[at:], name)
		if i < 0 {
			return false
		}
		begin, end := at+i, at+i+len(name)
		if (begin == 0 || !isOfName(text[begin-1])) && (end == len(text) || !isOfName(text[end])) {
			return true
		}
		at = end
	}
}

func isOfName(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

var (
	definitions = regexp.MustCompile(`(?s)CREATE OR REPLACE (?:FUNCTION|VIEW) .*?\n  COMMENT ON`)
	mentions    = regexp.MustCompile(`(?s)(?:CREATE|DROP|ALTER|COMMENT ON) (?:UNLOGGED )?(?:FUNCTION|TABLE|VIEW|SEQUENCE|COLUMN)[^;]*;`)
)

// ownStatements returns what the files of the migrations do themselves, such as to call a
// function: not what they make, change, describe or drop.
func ownStatements(t *testing.T) (text string) {
	t.Helper()
	for _, name := range sqlFiles(t, migrations.FS) {
		sql := definitions.ReplaceAllString(content(t, migrations.FS, name), "  COMMENT ON")
		text += mentions.ReplaceAllString(withoutComments.ReplaceAllString(sql, ""), "")
	}
	return text
}

// sqlFiles returns the paths of all SQL files in a directory and in those below it.
func sqlFiles(t *testing.T, in fs.FS) (found []string) {
	t.Helper()
	err := fs.WalkDir(in, ".", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && strings.HasSuffix(path, ".sql") {
			found = append(found, path)
		}
		return err
	})
	if err != nil || len(found) < 10 {
		t.Fatalf("%d files: %v", len(found), err)
	}
	return found
}

func content(t *testing.T, in fs.FS, name string) string {
	t.Helper()
	text, err := fs.ReadFile(in, name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// objectsPage is written by TestSQLObjectsHaveUsersAndAPage with -update.
const objectsPage = "sql-objects.md"

func TestSQLObjectsHaveUsersAndAPage(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	all := objects(t)
	documented := entries(t)

	// A user is another function or a view, or a statement of the Go packages or of the migrations
	// themselves; functions for callers and views have an entry in the reference. The list of
	// rights uses nothing.
	used := ownStatements(t)
	for _, dir := range []string{"../../sql", "../../migrations/sql"} {
		root := os.DirFS(dir)
		for _, name := range sqlFiles(t, root) {
			used += withoutComments.ReplaceAllString(content(t, root, name), "")
		}
	}
	for _, o := range all {
		if _, forCallers := documented[o.Name]; !forCallers && !mentioned(used, o.Name) && !slices.ContainsFunc(all, func(other object) bool {
			return other.Name != o.Name && other.Name != "pgxlock_rights" && mentioned(other.Definition, o.Name)
		}) {
			t.Errorf("nothing uses the %s %s", o.Kind, o.Name)
		}
	}

	// The page for the administrator of a database is made from the catalog.
	want := pageOfObjects(t, all, documented)
	if *update {
		if err := os.WriteFile("../../docs/"+objectsPage, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	if page(t, objectsPage) != want {
		t.Errorf("docs/%s is not what the catalog says: go test ./internal/sqltest -run %s -update", objectsPage, t.Name())
	}
}

const objectsIntroduction = `# The SQL objects

What the migrations make in your schema, beside indexes: no extension, no trigger, no background worker.

- [Tables and sequences](#tables-and-sequences), [views](#views), [functions for callers](#functions-for-callers),
  [internal functions](#internal-functions)

A test writes this from an installed schema and what
[grant_locks](sql-administration.md#grant_locks) gives. A = application, M = monitoring, D = administration: the [kinds
of roles](rights.md#three-kinds-of-roles); the rest is the owner's alone.

As installed, any role may call any function, which runs with its caller's rights; only ` + "`pgxlock_next_tokens`" + ` is
SECURITY DEFINER. [Hardened](rights.md#hardened), a function is for the kinds that its row names, and SECURITY DEFINER
if there are any.
`

// pageOfObjects returns docs/sql-objects.md.
func pageOfObjects(t *testing.T, all []object, documented map[string]docEntry) string {
	t.Helper()
	text := objectsIntroduction + `
## Tables and sequences

As installed: s = SELECT, i = INSERT, u = UPDATE, d = DELETE, U = USAGE. Hardened, no role but the owner writes a table.

| table or sequence | holds | rows | hardened: may read | as installed: may |
|---|---|---|---|---|
`
	for _, o := range all {
		if o.Kind != "table" && o.Kind != "sequence" {
			continue
		}
		holds, rows, _ := strings.Cut(o.Comment, " Rows: ")
		if o.Kind == "table" && rows == "" {
			t.Errorf("the comment on %s does not say which rows it has", o.Name)
		}
		name := "`" + o.Name + "`"
		if o.Unlogged {
			name += " (unlogged)"
		}
		if o.Kind == "sequence" {
			name += " (sequence)"
		}
		text += fmt.Sprintf("| %s | %s | %s | %s | %s |\n", name, described(holds), described(rows), letters(o.May), privileges(o.Otherwise))
	}
	text += `
## Views

` + "`lock_holders` and `lock_waiters`" + ` read the server's whole lock table: query them no more often than every few seconds.

| view | shows | may read |
|---|---|---|
`
	for _, o := range all {
		if o.Kind == "view" {
			text += fmt.Sprintf("| [%[1]s](%[2]s#%[1]s) | %[3]s | %[4]s |\n", o.Name, documented[o.Name].page, described(firstPart.FindString(o.Comment)), letters(o.May))
		}
	}
	text += `
## Functions for callers

| function | does | hardened: may call |
|---|---|---|
`
	internal := make(map[string][]string)
	var exceptions []string // of the rule that the introduction states
	for _, o := range all {
		if o.Kind != "function" {
			continue
		}
		may := letters(o.May)
		if o.Definer != (may != "-") {
			exceptions = append(exceptions, "`"+o.Name+"`")
		}
		if strings.HasPrefix(o.Comment, "pgxlock, internal: ") {
			internal[may] = append(internal[may], "`"+o.Name+"`")
			continue
		}
		does := described(firstPart.FindString(aside.ReplaceAllString(o.Comment, "")))
		text += fmt.Sprintf("| [%[1]s](%[2]s#%[1]s) | %[3]s | %[4]s |\n", o.Name, documented[o.Name].page, does, may)
	}
	text += "\n## Internal functions\n\nThe views and the Go packages call these. Do not call them. Only other functions call the rest of " +
		"`pgxlock_...`.\n\n| hardened: may call | functions |\n|---|---|\n"
	delete(internal, letters(nil))
	for _, group := range slices.Sorted(maps.Keys(internal)) {
		text += "| " + group + " | " + strings.Join(internal[group], ", ") + " |\n"
	}
	return text + "\nThe rule of SECURITY DEFINER has exceptions: " + strings.Join(exceptions, ", ") + ".\n"
}

var (
	prefix      = regexp.MustCompile(`^pgxlock(, internal)?: `)
	aside       = regexp.MustCompile(` \([^)]*\)`)
	firstPart   = regexp.MustCompile(`^.*?(?:[.;] |\.$)`)
	onlyThrough = regexp.MustCompile(`(?: Write it only|; otherwise write it only) through the functions?\.`)
)

// described returns a comment as a cell of a table.
func described(comment string) string {
	comment = onlyThrough.ReplaceAllString(prefix.ReplaceAllString(comment, ""), "")
	if first, _, _ := strings.Cut(comment, " "); first != "" && !strings.ContainsAny(first, "_(") {
		comment = strings.ToUpper(comment[:1]) + comment[1:]
	}
	return strings.NewReplacer("|", `\|`, "*", `\*`).Replace(strings.TrimRight(comment, ".; "))
}

// kindLetters are the initials of the kinds of roles.
var kindLetters = []struct{ kind, letter string }{{"application", "A"}, {"monitoring", "M"}, {"administration", "D"}}

// letters returns the initials of kinds of roles.
func letters(of []string) (found string) {
	for _, k := range kindLetters {
		if slices.Contains(of, k.kind) {
			found += k.letter
		}
	}
	if found == "" {
		return "-"
	}
	return found
}

// privileges returns what kinds of roles may do, such as "A: siud", of what the query says, such
// as "application SEINUPDE".
func privileges(of []string) string {
	var found []string
	for _, k := range kindLetters {
		for _, privileges := range of {
			if may, ok := strings.CutPrefix(privileges, k.kind+" "); ok {
				text := k.letter + ": "
				for _, p := range []struct{ begins, letter string }{{"SE", "s"}, {"IN", "i"}, {"UP", "u"}, {"DE", "d"}, {"US", "U"}} {
					if strings.Contains(may, p.begins) {
						text += p.letter
					}
				}
				found = append(found, text)
			}
		}
	}
	return strings.Join(found, ", ")
}
