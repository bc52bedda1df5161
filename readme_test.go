package pgxlock_test

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
)

// snippets returns the README's code blocks of one language.
func snippets(t *testing.T, language string) []string {
	t.Helper()
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, match := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```").FindAllSubmatch(text, -1) {
		found = append(found, string(match[1]))
	}
	if len(found) == 0 {
		t.Fatalf("the README has no %s", language)
	}
	return found
}

// What the README's Go snippets leave to the reader.
const readmeHeader = `package readme

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/migrations"
)

var (
	_ = errors.New
	_ = log.Print
	_ = time.Second
	_ = pgx.BeginFunc
	_ = migrations.Up

	buildReport     func(context.Context) error
	callSlowService func(context.Context) (int, error)
	warm            func(context.Context, int64) error
)
`

// The snippets are compiled as they stand, each as the body of a function, in a
// package that exists only for the compiler.
func TestTheReadmesGoCompiles(t *testing.T) {
	t.Parallel()
	var source bytes.Buffer
	source.WriteString(readmeHeader)
	for i, snippet := range snippets(t, "go") {
		fmt.Fprintf(&source, "\nfunc snippet%d(ctx context.Context, pool *pgxpool.Pool, locks *pgxlock.Locker) error {\n%s%s\treturn nil\n}\n",
			i, snippet, useAll(t, snippet))
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "readme.go")
	if err := os.WriteFile(file, source.Bytes(), 0o600); err != nil {
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
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlayFile, "./internal/readme").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\n%s", err, out, source.Bytes())
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
				fmt.Fprintf(&uses, "\t_ = %s\n", left.(*ast.Ident).Name)
			}
		}
	}
	return uses.String()
}

func TestTheReadmesSQLRuns(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, "create table invoices (id int primary key, total int)")
	db.Exec(t, "select acquire_lock('invoice:42', 'worker-1:7f3a')")
	for _, snippet := range snippets(t, "sql") {
		db.Exec(t, snippet)
	}
}
