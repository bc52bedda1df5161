// Package golangmigrate installs pgxlock's tables and functions through the library of
// golang-migrate, for programs that run all their migrations with it:
//
//	err := golangmigrate.Up(ctx, pool)
//
// It is a module of its own: [migrations.Up] does the same without golang-migrate, and
// clears the mark that golang-migrate leaves when a file failed. Both see what the other one
// installed.
package golangmigrate

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"

	"github.com/golang-migrate/migrate/v4"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgxlock/pgxlock/migrations"
)

// NewSource returns the files of package migrations as a source of golang-migrate. The
// version table that goes with it is [migrations.Table].
func NewSource() (source.Driver, error) { return iofs.New(migrations.FS, ".") }

// New returns a Migrate that runs the files of package migrations, with the pool's
// connections, in the first schema of their search_path. Close it after use; the pool stays
// open.
func New(ctx context.Context, pool *pgxpool.Pool) (*migrate.Migrate, error) {
	if pool == nil {
		return nil, errors.New("pgxlock: golangmigrate: the pool is nil; make one with pgxpool.New")
	}
	if err := pool.Ping(ctx); err != nil { // golang-migrate has no context
		return nil, fmt.Errorf("pgxlock: golangmigrate: %w", err)
	}
	files, err := NewSource()
	if err != nil {
		return nil, fmt.Errorf("pgxlock: golangmigrate: %w", err)
	}
	lent := &lender{Connector: stdlib.GetPoolConnector(pool)}
	db := sql.OpenDB(lent)
	db.SetMaxIdleConns(0) // the pool has those
	database, err := migratepgx.WithInstance(db, &migratepgx.Config{MigrationsTable: migrations.Table})
	if err != nil {
		return nil, fmt.Errorf("pgxlock: golangmigrate: %w", errors.Join(err, db.Close(), lent.takeBack()))
	}
	m, err := migrate.NewWithInstance("pgxlock", files, "pgx5", database)
	if err != nil {
		return nil, fmt.Errorf("pgxlock: golangmigrate: %w", errors.Join(err, database.Close()))
	}
	return m, nil
}

// A lender knows the connections of the pool that golang-migrate has. Where it cannot make its version
// table, for example because another program has just made it, it keeps one, for which Close of the
// pool would wait for ever.
type lender struct {
	driver.Connector
	mu   sync.Mutex
	lent []driver.Conn
}

// Connect implements [driver.Connector].
func (l *lender) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := l.Connector.Connect(ctx)
	if err == nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.lent = append(l.lent, conn)
	}
	return conn, err
}

// takeBack gives the pool what it does not have back yet.
func (l *lender) takeBack() (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, conn := range l.lent {
		err = errors.Join(err, conn.Close())
	}
	return err
}

// Up brings the schema to the newest version. It does nothing where that is installed. If
// ctx ends, Up finishes the file that has begun, and returns the context's error.
func Up(ctx context.Context, pool *pgxpool.Pool) (err error) {
	m, err := New(ctx, pool)
	if err != nil {
		return err
	}
	defer func() {
		sourceErr, databaseErr := m.Close()
		err = errors.Join(err, sourceErr, databaseErr)
	}()
	stop := context.AfterFunc(ctx, func() { m.GracefulStop <- true }) // has room for it
	defer stop()
	if err := m.Up(); err != nil && !errors.Is(err, migrate.ErrNoChange) {
		return fmt.Errorf("pgxlock: golangmigrate: up: %w", err)
	}
	return context.Cause(ctx)
}
