package documents

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"hash/crc32"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/migrations"
)

// comingFrom is the page whose SQL has tests of its own.
const comingFrom = "docs/coming-from.md"

// pages returns README.md and every page of docs/.
func pages(t *testing.T) []string {
	t.Helper()
	found, err := fs.Glob(os.DirFS("."), "docs/*.md")
	if err != nil || len(found) < 10 {
		t.Fatalf("%d pages in docs/: %v", len(found), err)
	}
	return append([]string{"README.md"}, found...)
}

// snippets returns a document's code blocks of one language.
func snippets(t *testing.T, document, language string) []string {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, match := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```").FindAllSubmatch(text, -1) {
		found = append(found, string(match[1]))
	}
	return found
}

// snippetWith returns the code block that contains a text.
func snippetWith(t *testing.T, document, language, text string) string {
	t.Helper()
	for _, snippet := range snippets(t, document, language) {
		if strings.Contains(snippet, text) {
			return snippet
		}
	}
	t.Fatalf("%s has no %s with %q", document, language, text)
	return ""
}

// What the documents' Go snippets leave to the reader.
const readmeHeader = `package readme

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/crc32"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/once"
	"github.com/pgxlock/pgxlock/ratelimit"
)

var (
	_ sql.IsolationLevel
	_ = errors.New
	_ = fmt.Sprint
	_ = crc32.ChecksumIEEE
	_ = log.Print
	_ = slog.Default
	_ = os.Getenv
	_ = time.Second
	_ = pgx.BeginFunc
	_ = migrations.Up
	_ = once.New
	_ = ratelimit.New

	buildReport     func(context.Context) error
	reportOf        func(context.Context, time.Time) error
	rebuild         func(context.Context) error
	callSlowService func(context.Context) (int, error)
	warm            func(context.Context, int64) error
	transfer        func(ctx context.Context, tx pgx.Tx, from, to, amount int) error
	process         func(context.Context, pgx.Tx) error
	report          func(context.Context, pgx.Tx) error
	bill            func(context.Context) error
	schedule        func(ctx context.Context, term int64) error
	send            func(context.Context) error

	limiter *ratelimit.Limiter

	// of programs on database/sql, GORM and sqlx
	db     *sql.DB
	gormTx struct{ Statement *struct{ ConnPool any } }
	sqlxTx struct{ *sql.Tx }

	// of github.com/bsm/redislock, which is nothing to depend on
	redisLocks interface {
		Obtain(ctx context.Context, key string, ttl time.Duration, opt *struct{}) (redisLock, error)
	}
)

type redisLock interface{ Release(context.Context) error }
`

// The snippets are compiled as they stand, each as a block of a function, so that it may
// declare what others are given, in a package that exists only for the compiler.
func TestTheGoOfTheDocumentsCompiles(t *testing.T) {
	t.Parallel()
	var source bytes.Buffer
	source.WriteString(readmeHeader)
	count := 0
	for _, document := range pages(t) {
		for _, snippet := range snippets(t, document, "go") {
			if strings.HasPrefix(snippet, "package ") {
				continue // TestTheReadmesProgramRuns builds it
			}
			count++
			fmt.Fprintf(&source, "\nfunc snippet%d(ctx context.Context, pool *pgxpool.Pool, locks *pgxlock.Locker) error {\n{\n%s%s}\n\treturn nil\n}\n",
				count, snippet, useAll(t, snippet))
		}
	}
	if count < 40 {
		t.Errorf("the documents have %d snippets of Go", count)
	}
	build(t, source.Bytes(), os.DevNull)
}

// build compiles a package that exists only for the compiler.
func build(t *testing.T, source []byte, output string) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "readme.go")
	if err := os.WriteFile(file, source, 0o600); err != nil {
		t.Fatal(err)
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{filepath.Join(here, "internal/readme/readme.go"): file}})
	if err != nil {
		t.Fatal(err)
	}
	overlayFile := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlayFile, overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", output, "-overlay", overlayFile, "./internal/readme").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s\n%s", err, out, source)
	}
}

// The README's program is whole: it installs the schema, and its write is committed.
func TestTheReadmesProgramRuns(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "program")
	build(t, []byte(snippetWith(t, "README.md", "go", "package main")), program)
	db := pgtest.New(t)
	for run := range 2 {
		cmd := exec.CommandContext(t.Context(), program)
		cmd.Env = append(os.Environ(), "DATABASE_URL="+db.URL)
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "this process alone has the lock, with token ") {
			t.Fatalf("run %d: %v\n%s", run, err, out)
		}
	}
	if !testkit.Query[bool](t, db, "select to_regclass('reports') is not null and not exists (select from distributed_locks)") {
		t.Error("nothing was written, or the lease is still there")
	}
}

// useAll makes the compiler accept variables that a snippet only shows.
func useAll(t *testing.T, snippet string) string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "", "package p\nfunc f() {\n"+snippet+"}", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, snippet)
	}
	var uses strings.Builder
	for _, statement := range file.Decls[0].(*ast.FuncDecl).Body.List {
		if assign, ok := statement.(*ast.AssignStmt); ok && assign.Tok == token.DEFINE {
			for _, left := range assign.Lhs {
				if name := left.(*ast.Ident).Name; name != "_" {
					fmt.Fprintf(&uses, "\t_ = %s\n", name)
				}
			}
		}
	}
	return uses.String()
}

// sqlElsewhere matches the pages whose SQL other tests run, because it has to fail here and
// there, or needs roles or other sessions: those of examples/sql, internal/sqltest,
// internal/systemtest, and those below.
var sqlElsewhere = regexp.MustCompile(`^docs/(sql|sql-(leases|shared|transactions|advisory|waiting|limits|runs|monitor|administration|languages)|` +
	`database-sql|operations|install|rights|connections|failover|doctor|monitor|coming-from)\.md$`)

// The SQL of each page runs as it stands, in its order, in a database of its own.
func TestTheSQLOfTheDocumentsRuns(t *testing.T) {
	t.Parallel()
	ran := 0
	for _, document := range pages(t) {
		statements := snippets(t, document, "sql")
		if len(statements) == 0 || sqlElsewhere.MatchString(document) {
			continue
		}
		ran++
		t.Run(document, func(t *testing.T) {
			t.Parallel()
			db := testkit.Migrated(t)
			db.Exec(t, `create table invoices (id int primary key, total int); create table jobs (id int);
				create table bookings (event int, guest text); create table shipments (order_id int)`)
			db.Exec(t, "select acquire_lock('invoice:42', 'worker-1:7f3a')")
			for _, snippet := range statements {
				db.Exec(t, snippet)
			}
		})
	}
	if ran < 5 {
		t.Errorf("%d pages have SQL", ran)
	}
}

// docs/coming-from.md gives the keys by which Go takes the locks of programs that hash names
// themselves.
func TestRawKeysAreTheLocksOfProgramsThatHash(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	old, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer old.Rollback(context.Background())
	for _, name := range []string{"invoice:42", "invoice:45"} {
		for lock, key := range map[string]string{
			"hashtext('" + name + "')":                                     pgxlock.RawKey(testkit.Query[int64](t, db, "select hashtext('"+name+"')::bigint")),
			fmt.Sprint(crc32.ChecksumIEEE([]byte(name))&0x7fffffff, ", 0"): pgxlock.RawKey2(int32(crc32.ChecksumIEEE([]byte(name))&0x7fffffff), 0),
		} {
			try := func() error {
				return pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
					return pgxlock.LockTx(t.Context(), tx, key, pgxlock.NoWait)
				})
			}
			if err := try(); err != nil {
				t.Errorf("%s, free: %v", lock, err)
			}
			if _, err := old.Exec(t.Context(), "select pg_advisory_xact_lock("+lock+")"); err != nil {
				t.Fatal(err)
			}
			if err := try(); !errors.Is(err, pgxlock.ErrNotAcquired) {
				t.Errorf("%s, locked: %v", lock, err)
			}
		}
	}
}

// The statements of a ShedLock provider, as docs/coming-from.md gives them.
func TestShedLocksCallsAreThoseOfALease(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	for statement := range strings.SplitSeq(strings.TrimSpace(snippetWith(t, comingFrom, "sql", "lockAtMostFor")), "\n") {
		if !testkit.Query[bool](t, db, statement) {
			t.Errorf("false: %s", statement)
		}
	}
}

// A program that takes both locks excludes those that take one of them, so a fleet
// can change over in two steps, and not in one.
func TestAFleetChangesOverFromShedLockInTwoSteps(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	db.Exec(t, `create table shedlock (name varchar(64) not null, lock_until timestamp not null,
		locked_at timestamp not null, locked_by varchar(255) not null, primary key (name))`) // as ShedLock's README has it
	take, giveBack, _ := strings.Cut(snippetWith(t, comingFrom, "sql", "INSERT INTO shedlock"), ";")
	locks := testkit.NewLocker(t, db, nil)

	// try takes the locks of one kind of program, or none, and returns what gives
	// them back.
	const oldLock, newLock, both = 1, 2, 3
	try := func(kind int, id string) (release func(), ok bool) {
		undo := func() {}
		if kind&oldLock != 0 {
			if db.Exec(t, strings.ReplaceAll(take, "go-1:7f3a", id)).RowsAffected() == 0 {
				return nil, false
			}
			undo = func() { db.Exec(t, strings.ReplaceAll(giveBack, "go-1:7f3a", id)) }
		}
		if kind&newLock == 0 {
			return undo, true
		}
		lock, err := locks.TryAcquire(t.Context(), "nightly")
		if errors.Is(err, pgxlock.ErrNotAcquired) {
			undo()
			return nil, false
		}
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			if err := lock.Release(t.Context()); err != nil {
				t.Error(err)
			}
			undo()
		}, true
	}
	for _, holder := range []int{oldLock, newLock, both} {
		for _, other := range []int{oldLock, newLock, both} {
			release, ok := try(holder, "holder")
			if !ok {
				t.Fatalf("program %d does not get what is free", holder)
			}
			second, together := try(other, "other")
			if together {
				second()
			}
			if excluded := holder&other != 0; together == excluded {
				t.Errorf("programs %d and %d hold it together: %t", holder, other, together)
			}
			release()
		}
	}
}

// What docs/coming-from.md says that callers of the copied functions may notice.
// What takes two transactions to see is in internal/sqltest.
func TestTheUpgradeChangesWhatTheDocumentSays(t *testing.T) {
	t.Parallel()
	seed, err := os.ReadFile("testdata/seed.sql")
	if err != nil {
		t.Fatal(err)
	}
	before, after := pgtest.New(t), pgtest.New(t)
	for _, db := range []*pgtest.DB{before, after} {
		db.Exec(t, string(seed))
		db.Exec(t, "select acquire_lock('held', 'old caller', 600)")
	}
	if err := migrations.Up(t.Context(), after.Pool, nil); err != nil {
		t.Fatal(err)
	}
	const (
		expire  = "update distributed_locks set expires_at = now() - interval '1 minute', acquired_at = now() - interval '2 minutes'; "
		first   = `select acquire_lock('k', 'a', 60, '{"v": 1}'); `
		refused = "22023"
	)
	for what, test := range map[string]struct{ do, ask, before, after string }{
		"what was held stays held":     {"", "acquire_lock('held', 'somebody else')", "false", "false"},
		"release after the expiry":     {first + expire, "release_lock('k', 'a')", "true", "false"},
		"the row goes all the same":    {first + expire + "select release_lock('k', 'a')", "not exists (select from distributed_locks where lock_name = 'k')", "true", "true"},
		"metadata of the same holder":  {first + `select acquire_lock('k', 'a', 60, '{"v": 2}')`, "select metadata->>'v' from distributed_locks where lock_name = 'k'", "1", "2"},
		"no metadata, the same holder": {first + `select acquire_lock('k', 'a')`, "select metadata->>'v' from distributed_locks where lock_name = 'k'", "1", "1"},
		"acquired_at of the same":      {first + "update distributed_locks set acquired_at = now() - interval '1 hour'; select acquire_lock('k', 'a')", "select now() - acquired_at > '1 minute' from distributed_locks where lock_name = 'k'", "false", "true"},
		"metadata after a take-over":   {first + expire + `select acquire_lock('k', 'b', 60, '{"v": 2}')`, "select metadata->>'v' from distributed_locks where lock_name = 'k'", "2", "2"},
		"a TTL of 0":                   {"", "acquire_lock('k', 'a', 0)", "true", refused},
		"an empty name":                {"", "acquire_lock('', 'a')", "true", refused},
		"a holder that is NULL":        {"", "acquire_lock('k', null)", "23502", refused},
		"a holder that begins with *":  {"", "acquire_lock('k', '*a')", "true", refused},
		"two that share a holder id":   {first, "acquire_lock('k', 'a')", "true", "true"},
		"the index":                    {"", "to_regclass('idx_locks_expires') is not null", "true", "false"},
		"the columns of select *":      {"", "select count(*) from pg_attribute where attrelid = 'distributed_locks'::regclass and attnum > 0", "5", "6"},
	} {
		for db, want := range map[*pgtest.DB]string{before: test.before, after: test.after} {
			db.Exec(t, "delete from distributed_locks where lock_name <> 'held'")
			db.Exec(t, test.do)
			var got string
			err := db.Pool.QueryRow(t.Context(), "select ("+test.ask+")::text").Scan(&got)
			if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
				got = pgErr.Code
			} else if err != nil {
				t.Fatal(err)
			}
			if got != want {
				t.Errorf("%s: %s, want %s (upgraded: %t)", what, got, want, db == after)
			}
		}
		for _, db := range []*pgtest.DB{before, after} {
			db.Exec(t, "update distributed_locks set expires_at = now() + interval '10 minutes' where lock_name = 'held'")
		}
	}
}
