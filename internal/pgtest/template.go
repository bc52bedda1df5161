package pgtest

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// A Template makes databases that all begin alike. To copy one is several times
// cheaper than to prepare each.
type Template struct {
	prepare func(context.Context, *pgxpool.Pool) error
	keep    bool

	once   sync.Once
	name   string
	origin origin
	err    error

	mu   sync.Mutex
	free []*DB // cleaned after a test, for the next one
}

// NewTemplate returns a Template whose databases are as prepare leaves one. It is run
// when the first of them is asked for.
func NewTemplate(prepare func(context.Context, *pgxpool.Pool) error) *Template {
	return &Template{prepare: prepare}
}

// Keep leaves the connections of a pool to the next test that has its database: a connection costs
// the server more than a small test, and what a session calls first is compiled in it. Not for
// tests that count connections.
func (t *Template) Keep() *Template {
	t.keep = true
	return t
}

// New is [New] for a database that is a copy of the template.
func (t *Template) New(tb testing.TB) *DB {
	tb.Helper()
	url := serverURL(tb)
	t.once.Do(func() { t.err = t.make(url) })
	if t.err != nil {
		tb.Fatalf("pgtest: template: %v", t.err)
	}
	db := t.take()
	if db == nil {
		db = &DB{Name: createDatabase(tb, shared.admin, t.name)}
		db.URL = withDatabase(tb, url, db.Name)
		db.Pool = newPool(tb, db.URL)
	}
	tb.Cleanup(func() { t.recycle(tb, db) })
	lent := *db // a test may change what it has
	return &lent
}

// take returns a database that is as good as new, nil if there is none.
func (t *Template) take() *DB {
	t.mu.Lock()
	defer t.mu.Unlock()
	last := len(t.free) - 1
	if last < 0 {
		return nil
	}
	db := t.free[last]
	t.free = t.free[:last]
	return db
}

// recycle cleans the database for the next test. It is dropped if that is not possible, or if
// the test failed.
func (t *Template) recycle(tb testing.TB, db *DB) {
	tb.Helper()
	if err := awaitReturned(db.Pool); err != nil {
		tb.Errorf("pgtest: %v", err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	if !tb.Failed() && t.origin.restore(ctx, db.Pool, t.keep) == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.free = append(t.free, db)
		return
	}
	db.Pool.Close()
	if err := shared.admin.dropDatabase(db.Name); err != nil {
		tb.Errorf("pgtest: drop database: %v", err)
	}
}

// make makes the template, which lives as long as the tests of the package.
func (t *Template) make(server string) error {
	t.name = newName()
	templates.Lock()
	templates.made = append(templates.made, t)
	templates.Unlock()
	// Nobody can be connected to template0, which is what makes a template1
	// that is being copied or looked at fail others.
	if err := shared.admin.copyDatabase("template0", t.name); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	url, err := replaceDatabase(server, t.name)
	if err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := t.prepare(ctx, pool); err != nil {
		return err
	}
	pool.Reset() // a new session leaves the file of the catalog's cache, to be copied with the others
	if err := pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		t.origin, err = readOrigin(ctx, conn.Conn())
		return err
	}); err != nil {
		return err
	}
	pool.Close()
	return shared.admin.exec("alter database " + t.name + " allow_connections false") // which would keep it from being copied
}

var templates struct {
	sync.Mutex

	made []*Template
}

// dropTemplates drops those that were made and their databases; it says what is left over.
func dropTemplates() (ok bool) {
	ok = true
	for _, t := range templates.made {
		names := []string{t.name}
		for _, db := range t.free {
			db.Pool.Close()
			names = append(names, db.Name)
		}
		for _, name := range names {
			if err := shared.admin.dropDatabase(name); err != nil {
				fmt.Fprintln(os.Stderr, "pgtest: drop database:", err)
				ok = false
			}
		}
	}
	return ok
}
