package main

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/place"
	"github.com/pgxlock/pgxlock/sql"
)

// An installation of pgxlock in a database: where it is, and the statements for it.

//go:embed sql/*.sql
var sqlFiles embed.FS

// statement returns the statement in sql/name.sql, with our objects qualified by
// the schema. The marker is a comment, so that psql runs the files as they are.
func statement(name, schema string) string {
	text, err := sqlFiles.ReadFile("sql/" + name + ".sql")
	if err != nil {
		panic("pgxlock: " + err.Error()) // a name that this program misspelt
	}
	return strings.ReplaceAll(string(text), "/* schema */", pgx.Identifier{schema}.Sanitize()+".")
}

// locate returns the schema that is named, or that a Locker would find, if it is one to trust.
func locate(ctx context.Context, pool *pgxpool.Pool, named string) (string, error) {
	var found place.Found
	err := pool.AcquireFunc(ctx, func(c *pgxpool.Conn) (err error) {
		found, err = dbconn.Querier{Conn: c.Conn()}.Look(ctx, named)
		return err
	})
	if err != nil {
		return "", err
	}
	schema, err := found.Choose(named)
	_, untrusted := errors.AsType[*place.UntrustedError](err)
	switch {
	case err == nil:
		return schema.Name, nil
	case untrusted:
		return "", err
	case named == "":
		return "", &remediedError{err, "--schema names a schema, pgxlock migrate up installs"}
	}
	return "", noPgxlock(named)
}

// inDatabase calls do on the database of the flags, with the schema of pgxlock.
func (t *target) inDatabase(ctx context.Context, do func(ctx context.Context, pool *pgxpool.Pool, schema string) error) error {
	pool, err := t.connect(ctx, writing)
	if err != nil {
		return err
	}
	defer pool.Close()
	schema, err := locate(ctx, pool, t.schema)
	if err != nil {
		return err
	}
	return ofSchema(schema, do(ctx, pool, schema))
}

// write is [dbconn.Querier.Write] on a connection of the pool.
func write(ctx context.Context, pool *pgxpool.Pool, sql string, args []any, into ...any) error {
	return pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
		return dbconn.Querier{Conn: c.Conn()}.Write(ctx, sql, args, into...)
	})
}

// rowsOf returns the rows of a statement for the schema that is named, or that a Locker would find.
// Nothing is filtered: row-level security hides nothing either, it fails.
func rowsOf[Row any](ctx context.Context, pool *pgxpool.Pool, named string, statement func(schema string) string, args []any, row pgx.RowToFunc[Row]) ([]Row, error) {
	schema, err := locate(ctx, pool, named)
	if err != nil {
		return nil, err
	}
	settings := dbconn.Step{SQL: statements.MonitorSettings.Text(), Args: []any{"", "", nil, 0}}
	var all []Row
	err = pool.AcquireFunc(ctx, func(c *pgxpool.Conn) (err error) {
		all, err = pgx.CollectRows(dbconn.Querier{Conn: c.Conn()}.Reading(ctx, settings, dbconn.Step{SQL: statement(schema), Args: args}), row)
		return err
	})
	return all, ofSchema(schema, lockerr.OnStandby(err)) // some tables are unlogged
}

// ofSchema says of an error which is due to a schema without our objects what to do about it.
func ofSchema(schema string, err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case ok && pgErr.Code == pgerrcode.InvalidSchemaName:
		return noPgxlock(schema)
	case ok && slices.Contains([]string{pgerrcode.UndefinedTable, pgerrcode.UndefinedFunction}, pgErr.Code):
		return &remediedError{fmt.Errorf("schema %q lacks a part of pgxlock: %s", schema, pgErr.Message), "run pgxlock migrate up --schema " + shellQuote(schema)}
	}
	return err
}

func noPgxlock(schema string) error {
	return &remediedError{fmt.Errorf("schema %q has no pgxlock", schema), "name another one with --schema, or run pgxlock migrate up --schema " + shellQuote(schema)}
}
