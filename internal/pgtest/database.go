// Each test creates its own database, which is dropped when the test is over.

package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// namePrefix begins the names of our databases, so that those that a killed run
// left on a server of yours can be told from others.
const namePrefix = "pgxlock_test_"

// createDatabase makes a copy of the template, dropped when the test is over.
func createDatabase(tb testing.TB, server, template string) (name string) {
	tb.Helper()
	name = newName()
	if err := admin(server, "create database "+name+" template "+template); err != nil {
		tb.Fatalf("pgtest: create database: %v", err)
	}
	tb.Cleanup(func() {
		if err := dropDatabase(server, name); err != nil {
			tb.Errorf("pgtest: drop database: %v", err)
		}
	})
	return name
}

func newName() string { return namePrefix + strings.ToLower(rand.Text()) }

func dropDatabase(server, name string) error {
	return admin(server, "drop database if exists "+name+" with (force)")
}

// admin runs one statement on the server. A database that somebody else, such
// as an autovacuum worker, is just looking at is worth another try. So is a drop
// that takes long: it waits until every process of the server has heard of it, and
// one whose lock_timeout ends in the same moment forgets that it has, until it is
// told again. Tests of waits do that hundreds of times a second. The context is
// not the test's, which is done when cleanups run.
func admin(server, sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	for {
		err := exec(ctx, server, "set statement_timeout = '10s'", sql)
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		if !ok || pgErr.Code != pgerrcode.ObjectInUse && pgErr.Code != pgerrcode.QueryCanceled {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func exec(ctx context.Context, server string, statements ...string) error {
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return err
	}
	for _, sql := range statements {
		if err == nil {
			_, err = conn.Exec(ctx, sql)
		}
	}
	return errors.Join(err, conn.Close(ctx))
}

// withDatabase changes the database that a connection string names.
func withDatabase(tb testing.TB, connString, name string) string {
	tb.Helper()
	changed, err := replaceDatabase(connString, name)
	if err != nil {
		tb.Fatalf("pgtest: %v", err)
	}
	return changed
}

// replaceDatabase knows both forms of connection strings: URLs, and words such
// as "host=localhost dbname=app", where the last of a kind counts.
func replaceDatabase(connString, name string) (string, error) {
	if !strings.HasPrefix(connString, "postgres://") && !strings.HasPrefix(connString, "postgresql://") {
		return connString + " dbname=" + name, nil
	}
	u, err := url.Parse(connString)
	if err != nil {
		return "", fmt.Errorf("connection string: %w", errors.Unwrap(err)) // the text around it repeats the password
	}
	u.Path, u.RawPath = "/"+name, ""
	query := u.Query()
	query.Del("dbname") // would overrule the path
	query.Del("database")
	u.RawQuery = query.Encode()
	return u.String(), nil
}
