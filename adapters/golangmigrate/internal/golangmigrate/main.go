// Golangmigrate runs pgxlock's migrations as programs do that use golang-migrate's library,
// for the tests of package migrations:
//
//	golangmigrate [pool | url | own-table] [up | down] URL
//
// With pool it hands its own pool to golang-migrate; with url it gives golang-migrate a
// connection string, and with own-table one without pgxlock's version table.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/golang-migrate/migrate/v4"
	_ "github.com/golang-migrate/migrate/v4/database/pgx/v5" // opens pgx5://
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/adapters/golangmigrate"
	"github.com/pgxlock/pgxlock/migrations"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 3 {
		return errors.New("usage: golangmigrate [pool | url | own-table] [up | down] URL")
	}
	way, direction, url := args[0], args[1], args[2]
	if way == "pool" {
		pool, err := pgxpool.New(context.Background(), url)
		if err != nil {
			return err
		}
		defer pool.Close()
		if direction == "up" {
			return golangmigrate.Up(context.Background(), pool)
		}
		m, err := golangmigrate.New(context.Background(), pool)
		if err != nil {
			return err
		}
		return migrateBy(m, direction)
	}
	files, err := golangmigrate.NewSource()
	if err != nil {
		return err
	}
	table := migrations.Table
	if way == "own-table" {
		table = ""
	}
	m, err := migrate.NewWithSourceInstance("pgxlock", files, asMigrates(url, table))
	if err != nil {
		return err
	}
	return migrateBy(m, direction)
}

func migrateBy(m *migrate.Migrate, direction string) error {
	do := m.Up
	if direction == "down" {
		do = m.Down
	}
	err := do()
	if errors.Is(err, migrate.ErrNoChange) {
		err = nil
	}
	sourceErr, databaseErr := m.Close()
	return errors.Join(err, sourceErr, databaseErr)
}

// asMigrates returns the connection string as golang-migrate reads it. An empty table is the
// one that golang-migrate takes by itself.
func asMigrates(url, table string) string {
	_, rest, _ := strings.Cut(url, "://")
	if table == "" {
		return "pgx5://" + rest
	}
	separator := "?"
	if strings.Contains(rest, "?") {
		separator = "&"
	}
	return "pgx5://" + rest + separator + "x-migrations-table=" + table
}
