package stacks_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// linesOfLocks returns how many lines of each function of this folder are there for the lock: statements that use pgxlock,
// a Locker or what these return, and the tests of their errors. What is called under a lock is the job.
func linesOfLocks(t *testing.T) map[string]int {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	lines, fset := map[string]int{}, token.NewFileSet()
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(fset, file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
				c := lineCounter{fset, map[string]bool{"pgxlock": true, "locks": true, "lock": true, "locked": true}, 0}
				c.block(f.Body.List)
				if name := f.Name.Name; name == "LockerBeside" { // whose job is nothing else
					lines[name] = c.line(f.Body.Rbrace) - c.line(f.Body.Lbrace) - 1
				} else if c.lines > 0 {
					lines[name] = c.lines
				}
			}
		}
	}
	return lines
}

type lineCounter struct {
	fset  *token.FileSet
	names map[string]bool // of what belongs to the lock
	lines int
}

func (c *lineCounter) block(list []ast.Stmt) {
	after := false // the statement before is the lock's
	for _, s := range list {
		if s, ok := s.(*ast.SwitchStmt); ok {
			c.block(s.Body.List) // its clauses
			continue
		}
		mentions := map[string]bool{}
		var jobs []*ast.BlockStmt // of functions, and of what the statement bounds
		ast.Inspect(s, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncLit:
				jobs = append(jobs, n.Body)
				return false
			case *ast.Ident:
				mentions[n.Name] = true
			}
			return true
		})
		test, ok := s.(*ast.IfStmt)
		of := ok && test.Init == nil && after && mentions["err"]
		for name := range mentions {
			of = of || c.names[name]
		}
		if of {
			c.lines += c.line(s.End()) - c.line(s.Pos()) + 1
			if assigned, ok := s.(*ast.AssignStmt); ok {
				for _, to := range assigned.Lhs {
					if name := to.(*ast.Ident).Name; name != "err" {
						c.names[name] = true
					}
				}
			}
		}
		for _, job := range jobs {
			if of {
				c.lines -= c.line(job.Rbrace) - c.line(job.Lbrace) - 1
			}
			c.block(job.List)
		}
		after = of
	}
}

func (c *lineCounter) line(p token.Pos) int { return c.fset.Position(p).Line }

// docs/database-sql.md says how many lines a lock adds to each job.
func TestLockAddsFewLinesToAJob(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/database-sql.md")
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]int{}
	for _, row := range regexp.MustCompile("(?m)^\\| [^|]* \\| (`[^|]*`) \\| (\\d+) \\|$").FindAllStringSubmatch(string(text), -1) {
		for _, name := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(row[1], -1) {
			said[name[1]], _ = strconv.Atoi(row[2])
		}
	}
	counted := linesOfLocks(t)
	for _, name := range slices.Sorted(maps.Keys(counted)) {
		if lines := counted[name]; said[name] != lines || lines > 10 {
			t.Errorf("%s: %d lines for the lock, docs/database-sql.md says %d, and 10 are the most", name, lines, said[name])
		}
		delete(said, name)
	}
	if len(said) > 0 {
		t.Errorf("docs/database-sql.md has lines of %v", said)
	}
}
