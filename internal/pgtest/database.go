// Databases are made, and dropped.

package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// namePrefix begins the names of our databases, so that those that a killed run
// left on a server of yours can be told from others.
const namePrefix = "pgxlock_test_"

// createDatabase makes a copy of the template.
func createDatabase(tb testing.TB, server *administrator, template string) (name string) {
	tb.Helper()
	name = newName()
	if err := server.copyDatabase(template, name); err != nil {
		tb.Fatalf("pgtest: create database: %v", err)
	}
	return name
}

func newName() string { return namePrefix + strings.ToLower(rand.Text()) }

// An administrator makes and drops databases, on few connections for all tests of a
// package: to connect costs the server as much as to drop one.
type administrator struct {
	pool *pgxpool.Pool
	made atomic.Int64 // databases
}

// administrators bounds the databases that are made or dropped at once.
const administrators = 4

func newAdministrator(server string) (*administrator, error) {
	config, err := pgxpool.ParseConfig(server)
	if err != nil {
		return nil, err
	}
	config.MaxConns = administrators
	config.ConnConfig.RuntimeParams["statement_timeout"] = "60s"
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	return &administrator{pool: pool}, err
}

// copyDatabase copies the files of the template. What PostgreSQL 15 does otherwise,
// block by block through its log, costs twice as much and leaves out the file of
// the catalog's cache, which the first session would have to make.
func (a *administrator) copyDatabase(template, name string) error {
	a.made.Add(1)
	return a.run(func(version int) string {
		sql := "create database " + name + " template " + template
		if version >= 15 {
			sql += " strategy file_copy"
		}
		return sql
	})
}

func (a *administrator) dropDatabase(name string) error {
	return a.exec("drop database if exists " + name + " with (force)")
}

func (a *administrator) exec(sql string) error {
	return a.run(func(int) string { return sql })
}

// run runs one statement on the server, whose version it tells. A database that somebody else, such
// as an autovacuum worker, is just looking at is worth another try. So is a drop
// that takes long: it waits until every process of the server has heard of it, and
// one whose lock_timeout ends in the same moment forgets that it has, until it is
// told again. Tests of waits do that hundreds of times a second. The context is
// not the test's, which is done when cleanups run.
func (a *administrator) run(sql func(version int) string) error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	for {
		err := a.pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
			major, _, _ := strings.Cut(conn.Conn().PgConn().ParameterStatus("server_version"), ".")
			version, _ := strconv.Atoi(major) // 0 for a version in the making, which is not asked for what is new
			_, err := conn.Exec(ctx, sql(version))
			return err
		})
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
