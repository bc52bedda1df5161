// Package sql_test runs the programs of this folder, and holds docs/sql-languages.md
// against them.
package sql_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/cutnet"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const jdbcJar = "/usr/share/java/postgresql.jar"

// A program runs where its interpreter and driver are installed.
type program struct {
	packages   string // of Debian
	check, run []string
}

// prepare compiles the program if it has to be, and returns what makes its command.
func (p program) prepare(t *testing.T, file string) func(*testing.T, *pgtest.DB) *exec.Cmd {
	t.Helper()
	if err := exec.CommandContext(t.Context(), p.check[0], p.check[1:]...).Run(); err != nil {
		pgtest.Missing(t, "languages", fmt.Errorf("it needs Debian's %s: %w", p.packages, err))
	}
	dir := "."
	if class, java := strings.CutSuffix(file, ".java"); java { // once: the compiler takes a second
		dir = t.TempDir()
		if out, err := exec.CommandContext(t.Context(), "javac", "-J-XX:TieredStopAtLevel=1", "-J-XX:+UseSerialGC", "-d", dir, file).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		file = filepath.Base(class)
	}
	return func(t *testing.T, db *pgtest.DB) *exec.Cmd {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), p.run[0], append(p.run[1:], file)...)
		cmd.Dir = dir
		cmd.Env = environment(t, db)
		return cmd
	}
}

// programs run where their interpreter and driver are installed, which check
// finds out. The file is the last argument of run.
var programs = map[string]program{
	"psql.sh":              {"postgresql-client", []string{"psql", "--version"}, []string{"sh"}},
	"ruby-activerecord.rb": {"ruby-pg ruby-activerecord", []string{"ruby", "-rlogger", "-ractive_record", "-rpg", "-e", ""}, []string{"ruby"}},
	"ruby-pg.rb":           {"ruby-pg", []string{"ruby", "-rpg", "-e", ""}, []string{"ruby"}},
	"php-pg.php":           {"php-cli php-pgsql", []string{"php", "-r", "exit(function_exists('pg_connect') ? 0 : 1);"}, []string{"php"}},
	"php-pdo.php":          {"php-cli php-pgsql", []string{"php", "-r", "exit(extension_loaded('pdo_pgsql') ? 0 : 1);"}, []string{"php"}},
	"python-psycopg.py":    {"python3-psycopg", []string{"/usr/bin/python3", "-c", "import psycopg"}, []string{"/usr/bin/python3"}},
	"python-psycopg2.py":   {"python3-psycopg2", []string{"/usr/bin/python3", "-c", "import psycopg2"}, []string{"/usr/bin/python3"}},
	"Jdbc.java":            {"default-jdk-headless libpostgresql-jdbc-java", []string{"sh", "-c", "command -v javac && test -e " + jdbcJar}, []string{"java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", jdbcJar + ":."}},
	"node-pg.js":           {"nodejs node-pg", []string{"node", "-e", "require('pg')"}, []string{"node"}},
	"perl-dbi.pl":          {"libdbd-pg-perl", []string{"perl", "-MDBD::Pg", "-e", ""}, []string{"perl"}},
}

var settled = pgtest.NewTemplate(func(ctx context.Context, pool *pgxpool.Pool) error {
	if err := migrations.Up(ctx, pool, nil); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, `
		CREATE TABLE invoices (id integer PRIMARY KEY, total integer);
		INSERT INTO invoices VALUES (42, 0);
		CREATE FUNCTION invoice_total(p_id integer) RETURNS integer LANGUAGE sql RETURN 100`)
	return err
})

func TestProgramSettlesTheInvoiceOnlyUnderTheLease(t *testing.T) {
	t.Parallel()
	rows := drivers(t)
	for file, program := range programs {
		if testing.Short() && file != "psql.sh" { // the program that is where PostgreSQL is
			continue
		}
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			falseIs := rows[file].falseIs
			start := program.prepare(t, file)
			for name, test := range map[string]struct{ before, says, holder, total string }{
				"the lease is free": {
					says: "settled", total: "100",
				},
				"another holder has the lease": {
					before: "SELECT acquire_lock('invoice:42', 'other:1')",
					says:   "busy: " + falseIs, holder: "other:1", total: "0",
				},
				"another holder takes over during the work": {
					before: `CREATE OR REPLACE FUNCTION invoice_total(p_id integer) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN
						UPDATE distributed_locks SET expires_at = clock_timestamp() - interval '1 second';
						PERFORM acquire_lock('invoice:42', 'other:1');
						RETURN 100;
					END $$`,
					says: "lost", holder: "other:1", total: "0",
				},
			} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					db := settled.New(t)
					db.Exec(t, test.before)
					out, err := start(t, db).CombinedOutput()
					if said := strings.TrimSpace(string(out)); err != nil || said != test.says {
						t.Errorf("it says %q (%v), want %q", said, err, test.says)
					}
					var holder, total string
					if err := db.Pool.QueryRow(t.Context(), `
						SELECT coalesce((SELECT holder_id FROM distributed_locks WHERE lock_name = 'invoice:42'), ''), total::text
						  FROM invoices`).Scan(&holder, &total); err != nil {
						t.Fatal(err)
					}
					if holder != test.holder || total != test.total {
						t.Errorf("the holder is %q and the total %s, want %q and %s", holder, total, test.holder, test.total)
					}
				})
			}
		})
	}
}

// waiting are the programs that wait in turn, with the program above that needs the same.
var waiting = map[string]string{
	"in_turn.py": "python-psycopg.py", "in_turn.rb": "ruby-pg.rb", "in_turn_activerecord.rb": "ruby-activerecord.rb",
	"in_turn.js": "node-pg.js", "in_turn.php": "php-pdo.php", "InTurn.java": "Jdbc.java",
}

// waits are what a program may wait for, with what another caller does before and after, and what of the program is changed
// for that.
var waits = map[string]struct {
	acquire, release, ask, queue string
	rewrite                      func(text string) string
}{
	"lease": {
		"acquire_lock('invoice:42', 'first')", "release_lock('invoice:42', 'first')", "acquire_in_turn('invoice:42', 'other:1')", "invoice:42",
		func(text string) string { return text },
	},
	"share": {
		"acquire_lock('invoice:42', 'first')", "release_lock('invoice:42', 'first')", "acquire_shared_in_turn('invoice:42', 'other:1')", "invoice:42",
		strings.NewReplacer(" acquire_in_turn(", " acquire_shared_in_turn(", " release_lock(", " release_shared_lock(").Replace,
	},
	"permit": {
		"acquire_permit('invoice:42', 'first', 1)", "release_lock('invoice:42#1', 'first')", "acquire_permits_in_turn('invoice:42', 'other:1', 1)", "invoice:42#",
		func(text string) string {
			text = strings.NewReplacer(" acquire_in_turn(", " acquire_permits_in_turn(", ", 60, ", ", 1, 1, 60, ", " fencing_token,", " fencing_tokens[1] AS fencing_token,").Replace(text)
			text = regexp.MustCompile(` release_lock\(([^,]+),`).ReplaceAllString(text, " release_lock($1 || chr(35) || 1,")
			return regexp.MustCompile(` wake_lock_waiter\(([^)]+)\)`).ReplaceAllString(text, " wake_lock_waiter($1 || chr(35))")
		},
	},
}

// Of two programs that wait the first one is killed: it gets nothing, and the other one its turn.
func TestProgramWaitsInTurn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for file, like := range waiting {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for name, wait := range waits {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					rewritten := filepath.Join(t.TempDir(), file)
					if err := os.WriteFile(rewritten, []byte(wait.rewrite(string(text))), 0o600); err != nil {
						t.Fatal(err)
					}
					start := programs[like].prepare(t, rewritten)
					db := settled.New(t)
					db.Exec(t, "SELECT "+wait.acquire)
					query := func(dest any, query string, args ...any) {
						t.Helper()
						if err := db.Pool.QueryRow(t.Context(), query, args...).Scan(dest); err != nil {
							t.Fatal(err)
						}
					}
					waits := func(ahead int) (cmd *exec.Cmd, out *strings.Builder, ended chan error) {
						t.Helper()
						cmd, out, ended = start(t, db), new(strings.Builder), make(chan error, 1)
						cmd.Stdout, cmd.Stderr = out, out
						if err := cmd.Start(); err != nil {
							t.Fatal(err)
						}
						go func() { ended <- cmd.Wait() }()
						pgtest.Until(t, "it waits, and asks again", func() (refreshed bool) {
							query(&refreshed, "SELECT EXISTS (SELECT FROM pgxlock_waiters WHERE name = $1 AND live_until > since + interval '3.5 s' ORDER BY ticket OFFSET $2)", wait.queue, ahead)
							return refreshed || len(ended) > 0
						})
						return cmd, out, ended
					}
					killed, _, ended := waits(0)
					if err := killed.Process.Kill(); err != nil {
						t.Fatal(err)
					}
					if err := <-ended; err == nil {
						t.Fatal("it ended before it was killed")
					}
					db.Exec(t, "UPDATE pgxlock_waiters SET live_until = 'infinity'")
					_, out, ended := waits(1)
					var behind string
					query(&behind, "SELECT concat(acquired, ticket > (SELECT max(ticket) FROM pgxlock_waiters WHERE owner <> 'other:1')) FROM "+wait.ask)
					db.Exec(t, "SELECT "+wait.release)
					err := <-ended
					if said := strings.TrimSpace(out.String()); err != nil || behind != "ft" || !regexp.MustCompile(`^acquired with token \d+$`).MatchString(said) {
						t.Errorf("it says %q (%v); the caller behind it: %s", said, err, behind)
					}
					var left int
					query(&left, "SELECT (SELECT count(*) FROM distributed_locks) + (SELECT count(*) FROM distributed_lock_shares)")
					if left != 0 {
						t.Errorf("%d leases and shares are left", left)
					}
				})
			}
		})
	}
}

// environment tells a program where the database is: libpq and node-postgres
// read the PG* variables. JDBC knows no Unix sockets, hence the relay.
func environment(t *testing.T, db *pgtest.DB) []string {
	t.Helper()
	cfg := db.Pool.Config().ConnConfig
	port := strconv.Itoa(int(cfg.Port))
	_, address := pgconn.NetworkAddress(cfg.Host, cfg.Port)
	relay := cutnet.NewRelay(t, cutnet.RelayConfig{Server: address})
	jdbc := url.URL{
		Scheme: "jdbc:postgresql", Host: relay.Address(), Path: "/" + cfg.Database,
		RawQuery: url.Values{"user": {cfg.User}, "password": {cfg.Password}}.Encode(),
	}
	var env []string
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "PG") {
			env = append(env, entry)
		}
	}
	return append(env, "PGHOST="+cfg.Host, "PGPORT="+port, "PGUSER="+cfg.User, "PGPASSWORD="+cfg.Password,
		"PGDATABASE="+cfg.Database, "JDBC_DATABASE_URL="+jdbc.String())
}

func document(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/sql-languages.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// driver is a row of the document's table of drivers.
type driver struct{ falseIs, notAcquired, lines string }

// drivers returns the rows, by their programs.
func drivers(t *testing.T) map[string]driver {
	t.Helper()
	found := make(map[string]driver)
	for _, row := range regexp.MustCompile("(?m)^\\|.*\\| `([^`]*)`[^|]* \\| `([^`]*)`[^|]* \\| \\[`?([^`\\]]*)`?\\]\\(\\.\\./examples/sql/[^|]* \\| (\\d+) \\|$").FindAllStringSubmatch(document(t), -1) {
		found[row[3]] = driver{falseIs: row[1], notAcquired: row[2], lines: row[4]}
	}
	return found
}

// code is a line of a program that is neither empty nor a comment.
var code = regexp.MustCompile(`(?m)^\s*([^\s#/*"<]|"[^"])`)

func TestDocumentQuotesEachProgram(t *testing.T) {
	t.Parallel()
	rows := drivers(t)
	if len(rows) != len(programs) {
		t.Errorf("docs/sql-languages.md lists %d programs, there are %d", len(rows), len(programs))
	}
	for file := range programs {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Error(err)
		} else if test := rows[file].notAcquired; test == "" || !strings.Contains(string(text), "if "+test) && !strings.Contains(string(text), "if ("+test+")") {
			t.Errorf("%s has no `if` with the test that docs/sql-languages.md gives, %q", file, test)
		} else if lines := len(code.FindAll(text, -1)); rows[file].lines != strconv.Itoa(lines) {
			t.Errorf("%s has %d lines, docs/sql-languages.md says %s", file, lines, rows[file].lines)
		}
	}
}
