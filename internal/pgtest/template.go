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
	t.once.Do(func() { t.err = t.make(tb, url) })
	if t.err != nil {
		tb.Fatalf("pgtest: template: %v", t.err)
	}
	return newDB(tb, url, t.name)
}

// make makes the template, which lives as long as the tests of the package.
func (t *Template) make(tb testing.TB, server string) error {
	tb.Helper()
	t.name = newName()
	templates.Lock()
	templates.drop = append(templates.drop, func() error { return dropDatabase(server, t.name) })
	templates.Unlock()
	if err := admin(server, "create database "+t.name+" template template0"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pool, err := pgxpool.New(ctx, withDatabase(tb, server, t.name))
	if err != nil {
		return err
	}
	err = t.prepare(ctx, pool)
	pool.Close()
	if err != nil {
		return err
	}
	return admin(server, "alter database "+t.name+" allow_connections false") // which would keep it from being copied
}

var templates struct {
	sync.Mutex

	drop []func() error
}

// dropTemplates drops those that were made; it says what is left over.
func dropTemplates() (ok bool) {
	ok = true
	for _, drop := range templates.drop {
		if err := drop(); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest: drop template:", err)
			ok = false
		}
	}
	return ok
}
