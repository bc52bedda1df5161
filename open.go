package pgxlock

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/connstring"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
)

// This file makes Lockers for programs on database/sql, which have no pool of pgx
// to take a configuration from, and shall not have to keep a second one.

// OpenLease is [NewLease] for a program that has a connection string: the one it
// gives to sql.Open, for the driver of pgx or for lib/pq. Nothing is sent before
// the first use.
//
// A string in either form will do, with the words of libpq that pgx knows, those
// of pgxpool and those of lib/pq, of which hostaddr, sslinline,
// ssl_min_protocol_version and ssl_max_protocol_version are refused with
// [errors.ErrUnsupported]; what it leaves open is in the PG* variables. Name the
// sslmode: where it is left open lib/pq has long required TLS, pgx as libpq only
// prefers it. Errors do not repeat the string.
func OpenLease(connString string, cfg *LeaseConfig) (*Locker, error) {
	return newLease(func() (*pgxpool.Config, error) {
		config, err := connstring.Parse(connString)
		if err != nil {
			return nil, fmt.Errorf("the connection string %w", err)
		}
		return config, nil
	}, cfg, clock.System)
}

// NewLeaseSQL is [NewLease] for a program that has a *sql.DB on the driver of
// pgx, however it was opened. It asks one connection of db how that was made,
// passwords and TLS included, and gives it back: later nothing goes through db,
// so that an exhausted db costs no lease. Connecting, or the wait for that
// connection, ends with ctx, and after 10 s.
//
// What hooks did to that connection's configuration holds for the Locker's own
// connections, but the hooks are not run for these, for database/sql does not tell
// of them. Where they matter, such as a BeforeConnect that fetches passwords which
// expire, give a pgxpool.Pool with the same hooks to NewLease; to a db of
// stdlib.OpenDBFromPool, its pool. Drivers that wrap another one are looked into
// if their connections have a method Raw that returns that of the other. lib/pq
// does not tell how a connection was made: [errors.ErrUnsupported], use
// [OpenLease].
func NewLeaseSQL(ctx context.Context, db *sql.DB, cfg *LeaseConfig) (*Locker, error) {
	return newLease(func() (*pgxpool.Config, error) { return configOf(ctx, db) }, cfg, clock.System)
}

// configOf returns the configuration of a connection of db.
func configOf(ctx context.Context, db *sql.DB) (*pgxpool.Config, error) {
	if err := lockerr.MissingContext(ctx); err != nil {
		return nil, err
	}
	if db == nil {
		return nil, errors.New("the db is nil; make one with sql.Open")
	}
	ctx, cancel := context.WithTimeout(ctx, 2*dbconn.Timeout) // a caller that holds all of them would wait for itself
	defer cancel()
	conn, err := db.Conn(ctx)
	if err != nil {
		if stats := db.Stats(); ctx.Err() != nil && stats.InUse > 0 && stats.InUse == stats.MaxOpenConnections {
			err = fmt.Errorf("all %d that it may open are in use: %w", stats.InUse, err)
		}
		return nil, fmt.Errorf("db gives no connection to take the configuration from: %w", err)
	}
	var config *pgx.ConnConfig
	err = conn.Raw(func(c any) error {
		config, err = configOfConn(c)
		return err
	})
	if closing := conn.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return nil, err
	}
	config.OnNotification = nil // that connection's own
	return &pgxpool.Config{ConnConfig: config}, nil
}

func configOfConn(conn any) (*pgx.ConnConfig, error) {
	for {
		switch c := conn.(type) {
		case interface{ Conn() *pgx.Conn }: // of pgx's package stdlib, which would register its driver if it were linked
			return c.Conn().Config(), nil
		case interface{ Raw() driver.Conn }:
			conn = c.Raw()
		default:
			return nil, fmt.Errorf("the driver of db, with connections of type %T, is not that of pgx/v5 and does not tell its configuration; use OpenLease with the connection string: %w", c, errors.ErrUnsupported)
		}
	}
}
