package documents

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

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
	"net/http"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/adapters/health"
	"github.com/pgxlock/pgxlock/locktesting"
	"github.com/pgxlock/pgxlock/migrations"
	"github.com/pgxlock/pgxlock/monitor"
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
	_ = http.Handle
	_ = health.Leader
	_ = locktesting.New
	_ = os.Getenv
	_ = synctest.Wait
	_ = time.Second
	_ = pgx.BeginFunc
	_ = migrations.Up
	_ = monitor.New
	_ = once.New
	_ = ratelimit.New

	buildReport     func(context.Context) error
	reportOf        func(context.Context, time.Time) error
	rebuild         func(context.Context) error
	callSlowService func(context.Context) (int, error)
	fetchPassword   func(context.Context) (string, error)
	warm            func(context.Context, int64) error
	transfer        func(ctx context.Context, tx pgx.Tx, from, to, amount int) error
	process         func(context.Context, pgx.Tx) error
	pay             func(ctx context.Context, tx pgx.Tx, request []byte) ([]byte, error)
	respond         func(answer []byte, err error) error
	report          func(context.Context, pgx.Tx) error
	bill            func(context.Context) error
	schedule        func(ctx context.Context, term int64) error
	send            func(context.Context) error

	limiter *ratelimit.Limiter

	user, idempotencyKey string // of an HTTP request
	body                 []byte

	// of a program's test
	t      *testing.T
	worker func(context.Context, *pgxlock.Lock) error

	db *sql.DB // of programs on database/sql

	// of github.com/bsm/redislock, which is nothing to depend on
	redisLocks interface {
		Obtain(ctx context.Context, key string, ttl time.Duration, opt *struct{}) (redisLock, error)
	}
)

type redisLock interface{ Release(context.Context) error }
`

// The snippets are compiled as they stand, each as a block of a function, so that it may
// declare what others are given, in a package that exists only for the compiler.
func TestGoOfTheDocumentsCompiles(t *testing.T) {
	pgtest.Builds(t)
	t.Parallel()
	var source bytes.Buffer
	source.WriteString(readmeHeader)
	count := 0
	for _, document := range pages(t) {
		for _, snippet := range snippets(t, document, "go") {
			if strings.HasPrefix(snippet, "package ") {
				continue // TestReadmesProgramRuns builds it
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
func TestReadmesProgramRuns(t *testing.T) {
	pgtest.Builds(t)
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
// internal/systemtest, and those of docs/coming-from.md here.
var sqlElsewhere = regexp.MustCompile(`^docs/(sql|sql-(leases|transactions|runs|monitor|administration|languages)|` +
	`database-sql|operations|install|rights|connections|failover|doctor|monitor|coming-from)\.md$`)

// The SQL of each page runs as it stands, in its order, in a database of its own.
func TestSQLOfTheDocumentsRuns(t *testing.T) {
	pgtest.Long(t)
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
	if ran < 4 {
		t.Errorf("%d pages have SQL", ran)
	}
}
