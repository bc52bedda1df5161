package sqltest_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// reference holds, by name, the pages that describe the functions for users: docs/sql.md, which
// has the rules, and docs/sql-*.md, which have an entry for each, and list them.
func reference(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("../../docs/sql*.md")
	if err != nil {
		t.Fatal(err)
	}
	pages := make(map[string]string)
	for _, path := range paths {
		pages[filepath.Base(path)] = page(t, filepath.Base(path))
	}
	if len(pages) < 7 || pages["sql.md"] == "" {
		t.Fatalf("%d pages", len(pages))
	}
	return pages
}

// page returns the text of a page of docs/.
func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// otherPages are those for operators, and for programs on database/sql. The SQL of docs/rights.md
// runs in internal/systemtest, with roles that log in.
var otherPages = []string{"connections.md", "database-sql.md", "doctor.md", "failover.md", "install.md", "monitor.md", "operations.md"}

var sqlBlock = regexp.MustCompile("(?ms)^```sql\n(.*?)^```")

// A statement of a document, and what the comment behind it says that it returns: true, false,
// NULL or a number, or "raises" and a SQLSTATE. "" means that it must not fail.
type statement struct{ sql, outcome string }

var promised = regexp.MustCompile(`^(?:(true|false|NULL|\d+)(?:[:;, ].*)?|raises ([0-9A-Z]{5})\b.*)$`)

// documentStatements returns the statements of a page. Each must end in a semicolon at the end of a line.
func documentStatements(t *testing.T, text string) (found []statement) {
	t.Helper()
	for _, block := range sqlBlock.FindAllStringSubmatch(text, -1) {
		sql := ""
		for line := range strings.Lines(block[1]) {
			code, comment, _ := strings.Cut(strings.TrimRight(line, "\n"), "-- ")
			code = strings.TrimRight(code, " ")
			if sql += code + "\n"; !strings.HasSuffix(code, ";") {
				continue
			}
			s := statement{sql: strings.TrimSpace(sql)}
			if m := promised.FindStringSubmatch(comment); m != nil {
				if s.outcome = m[1]; m[2] != "" {
					s.outcome = raised + m[2]
				}
			}
			found, sql = append(found, s), ""
		}
		if strings.TrimSpace(sql) != "" {
			t.Errorf("no semicolon ends %q", sql)
		}
	}
	return found
}

// returns runs a statement and gives its outcome as documents write it.
func (s *session) returns(sql string) string {
	results, err := s.conn.PgConn().Exec(s.t.Context(), sql).ReadAll()
	if err != nil {
		return raised + outcome("", err)
	}
	last := results[len(results)-1]
	switch {
	case len(last.Rows) == 0:
		return "no row"
	case last.Rows[0][0] == nil:
		return "NULL"
	case last.FieldDescriptions[0].DataTypeOID == 16: // boolean
		return map[string]string{"t": "true", "f": "false"}[string(last.Rows[0][0])]
	}
	return string(last.Rows[0][0])
}

// The statements of each page run in its order, in one session, and return what the comments
// behind them say.
func TestDocumentStatementsRun(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	pages := reference(t)
	for _, name := range otherPages {
		pages[name] = page(t, name)
	}
	checked := 0
	for name, text := range pages {
		found := documentStatements(t, text)
		for _, s := range found {
			if s.outcome != "" {
				checked++
			}
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := installAsIs(t)
			d.do(`create table invoices (id integer primary key, total integer); create table jobs (id integer); insert into jobs values (1);
				create table bookings (event integer, guest text); create table shipments (order_id integer); create table reports (body text)`)
			roles := strings.NewReplacer("'app'", quote(d.role()), "'metrics'", quote(d.role()), "'ops'", quote(d.role()))
			s := d.connect()
			for _, statement := range found {
				got := s.returns(roles.Replace(statement.sql))
				switch {
				case statement.outcome != "" && got != statement.outcome:
					t.Errorf("%s\nreturns %s, not %s", statement.sql, got, statement.outcome)
				case statement.outcome == "" && strings.HasPrefix(got, raised):
					t.Errorf("%s\n%s", statement.sql, got)
				}
			}
		})
	}
	if checked < 75 {
		t.Errorf("%d statements say what they return", checked)
	}
}

// raised begins the outcome of a statement that fails: a process id may look like a SQLSTATE.
const raised = "raises "

// docEntry is what a page says of one function, under a heading with its name.
type docEntry struct{ page, signature, text string }

var (
	heading   = regexp.MustCompile(`(?m)^## ([a-z_]+)$`)
	signature = regexp.MustCompile("^\n*```text\n(.*)\n```\n")
	errorsOf  = regexp.MustCompile(`(?m)^\*\*Errors:\*\* `)
)

// entries returns all entries by the names of their functions; views have one without a
// signature.
func entries(t *testing.T) map[string]docEntry {
	t.Helper()
	found := make(map[string]docEntry)
	for name, text := range reference(t) {
		for _, at := range heading.FindAllStringSubmatchIndex(text, -1) {
			body, _, _ := strings.Cut(text[at[1]:], "\n## ")
			e := docEntry{page: name, text: body}
			if m := signature.FindStringSubmatch(body); m != nil {
				e.signature = m[1]
			}
			what := text[at[2]:at[3]]
			if other, twice := found[what]; twice {
				t.Errorf("%s has an entry in %s and in %s", what, other.page, name)
			}
			found[what] = e
		}
	}
	return found
}

// Functions for users are those whose comment does not call them internal.
func TestDocumentSignaturesAreThoseOfTheFunctions(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	d := installAsIs(t)
	documented := entries(t)
	index := page(t, objectsPage)
	results, err := d.conn.PgConn().Exec(t.Context(), `
		select p.proname, regexp_replace(pg_get_function_arguments(p.oid), '::[a-z]+', '', 'g'), pg_get_function_result(p.oid)
		  from pg_proc p where p.pronamespace = current_schema()::regnamespace
		   and coalesce(obj_description(p.oid, 'pg_proc'), '') not like 'pgxlock, internal%'`).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	functions := make(map[string]bool)
	for _, row := range results[0].Rows {
		name := string(row[0])
		functions[name] = true
		e, ok := documented[name]
		if !ok {
			t.Errorf("no page has an entry for %s", name)
			continue
		}
		if got, want := d.canonical(e.signature), name+d.canonical(asWritten(string(row[1]), string(row[2]))); got != want {
			t.Errorf("%s says\n%s, not\n%s", e.page, got, want)
		}
		if !errorsOf.MatchString(e.text) {
			t.Errorf("%s does not say which errors %s raises", e.page, name)
		}
		if !slices.ContainsFunc(documentStatements(t, e.text), func(s statement) bool { return strings.Contains(s.sql, name+"(") }) {
			t.Errorf("%s has no example that calls %s", e.page, name)
		}
		if link := fmt.Sprintf("[%s](%s#%[1]s)", name, e.page); !strings.Contains(index, link) {
			t.Errorf("docs/%s has no link %s", objectsPage, link)
		}
	}
	for name, e := range documented {
		if e.signature != "" && !functions[name] {
			t.Errorf("%s has an entry for %s, which is no function for users", e.page, name)
		}
	}
}

func TestDocumentColumnsAreThoseOfTheViews(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	d := installAsIs(t)
	documented := entries(t)
	views := strings.Split(d.get("(select string_agg(viewname, ' ') from pg_views where schemaname = current_schema())"), " ")
	if len(views) != 4 {
		t.Errorf("views %v", views)
	}
	for _, view := range views {
		e, ok := documented[view]
		if !ok {
			t.Errorf("no page has an entry for %s", view)
			continue
		}
		if !strings.Contains(page(t, objectsPage), "["+view+"]("+e.page+"#"+view+")") {
			t.Errorf("docs/%s has no link to %s", objectsPage, view)
		}
		if view == "lock_leases" || view == "lock_shares" { // whose columns are those of the tables
			continue
		}
		for column := range strings.SplitSeq(d.get("(select string_agg(attname, ' ') from pg_attribute where attnum > 0 and attrelid = "+quote(view)+"::regclass)"), " ") {
			if !strings.Contains(e.text, "`"+column+"`") {
				t.Errorf("%s does not say what %s.%s is", e.page, view, column)
			}
		}
	}
}

// asWritten returns the arguments and the result of a function as documents write them, without
// its name: OUT parameters are the result.
func asWritten(arguments, result string) string {
	var in, out []string
	for argument := range strings.SplitSeq(arguments, ", ") {
		if name, ok := strings.CutPrefix(argument, "OUT "); ok {
			out = append(out, name)
		} else {
			in = append(in, argument)
		}
	}
	if len(out) > 0 {
		result = "(" + strings.Join(out, ", ") + ")"
	}
	return "(" + strings.Join(in, ", ") + ") → " + result
}

var intervalDefault = regexp.MustCompile(`interval DEFAULT '([^']*)'`)

// canonical returns a signature with short names of types, and intervals as the server writes
// them.
func (d *database) canonical(signature string) string {
	signature = strings.NewReplacer("character varying", "varchar", "timestamp with time zone", "timestamptz").Replace(signature)
	return intervalDefault.ReplaceAllStringFunc(signature, func(found string) string {
		return "interval DEFAULT '" + d.get(quote(intervalDefault.FindStringSubmatch(found)[1])+"::interval") + "'"
	})
}

// A page of reference has one idea, and begins with a list of its headings.
func TestDocumentPagesAreShortAndBeginWithTheirContents(t *testing.T) {
	t.Parallel()
	pages := reference(t)
	for _, name := range slices.Concat(otherPages, []string{"rights.md"}) {
		pages[name] = page(t, name)
	}
	for name, text := range pages {
		if words := len(strings.Fields(text)); words > 2000 {
			t.Errorf("docs/%s has %d words, more than 2,000", name, words)
		}
		first, _, _ := strings.Cut(text, "\n## ")
		for _, m := range secondHeading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
			if anchor := anchorOf(m[1]); !strings.Contains(first, "](#"+anchor+")") {
				t.Errorf("the contents of docs/%s have no link to #%s", name, anchor)
			}
		}
	}
}

var secondHeading = regexp.MustCompile(`(?m)^## (.*)$`)

// Errors, advice and help name pages by lockerr.ManualDoctor and its like, and a heading.
func TestDocumentsThatErrorsPointToExist(t *testing.T) {
	t.Parallel()
	manuals := map[string]string{"ManualDoctor": lockerr.ManualDoctor, "ManualEngines": lockerr.ManualEngines, "ManualInstall": lockerr.ManualInstall, "ManualRights": lockerr.ManualRights, "ManualTrust": lockerr.ManualTrust}
	named := make(map[string]bool)
	for _, dir := range []string{"../../doctor", "../../cmd/pgxlock", "../lockerr"} {
		paths, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range manual.FindAllSubmatch(text, -1) {
				url, ok := manuals[string(m[1])]
				if !ok {
					t.Errorf("%s: lockerr.%s is not known here", path, m[1])
					continue
				}
				named[string(m[1])] = true
				name := url[strings.LastIndex(url, "/")+1:]
				if anchor := string(m[2]); !slices.Contains(append(anchors(page(t, name)), ""), anchor) {
					t.Errorf("%s points to docs/%s#%s, and there is no such heading", path, name, anchor)
				}
			}
		}
	}
	if len(named) != len(manuals) {
		t.Errorf("only %v are named", named)
	}
}

var manual = regexp.MustCompile(`\b(Manual[A-Z][a-z]*)\b(?: \+ "#([a-z-]+))?`)

var (
	fenced      = regexp.MustCompile("(?ms)^```.*?^```")
	anyHeading  = regexp.MustCompile(`(?m)^#+ (.*)$`)
	notInAnchor = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchorOf returns the anchor of a heading as GitHub makes it.
func anchorOf(heading string) string {
	return strings.ReplaceAll(notInAnchor.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
}

// anchors returns the anchors of all headings of a page.
func anchors(text string) (found []string) {
	for _, m := range anyHeading.FindAllStringSubmatch(fenced.ReplaceAllString(text, ""), -1) {
		found = append(found, anchorOf(m[1]))
	}
	return found
}
