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
	"errors"
	"fmt"

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
	db := stdlib.OpenDBFromPool(pool)
	driver, err := migratepgx.WithInstance(db, &migratepgx.Config{MigrationsTable: migrations.Table})
	if err != nil {
		return nil, fmt.Errorf("pgxlock: golangmigrate: %w", errors.Join(err, db.Close()))
	}
	m, err := migrate.NewWithInstance("pgxlock", files, "pgx5", driver)
	if err != nil {
		return nil, fmt.Errorf("pgxlock: golangmigrate: %w", errors.Join(err, driver.Close()))
	}
	return m, nil
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
