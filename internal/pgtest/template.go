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

	once sync.Once
	name string
	err  error
}

// NewTemplate returns a Template whose databases are as prepare leaves one. It is run
// when the first of them is asked for.
func NewTemplate(prepare func(context.Context, *pgxpool.Pool) error) *Template {
	return &Template{prepare: prepare}
}

// New is [New] for a database that is a copy of the template.
func (t *Template) New(tb testing.TB) *DB {
	tb.Helper()
	url := serverURL(tb)
	t.once.Do(func() { t.err = t.make(url) })
	if t.err != nil {
		tb.Fatalf("pgtest: template: %v", t.err)
	}
	name := createDatabase(tb, shared.admin, t.name)
	db := &DB{Name: name, URL: withDatabase(tb, url, name)}
	db.Pool = Pool(tb, db.URL) // closed before the database is dropped: cleanups run last to first
	return db
}

// make makes the template, which lives as long as the tests of the package.
func (t *Template) make(server string) error {
	t.name = newName()
	templates.Lock()
	templates.drop = append(templates.drop, t.name)
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
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	pool.Close()
	return shared.admin.exec("alter database " + t.name + " allow_connections false") // which would keep it from being copied
}

var templates struct {
	sync.Mutex

	drop []string
}

// dropTemplates drops those that were made; it says what is left over.
func dropTemplates() (ok bool) {
	ok = true
	for _, name := range templates.drop {
		if err := shared.admin.dropDatabase(name); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest: drop template:", err)
			ok = false
		}
	}
	return ok
}
