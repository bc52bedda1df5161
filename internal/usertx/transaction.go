// Package usertx runs our statements in a transaction of the caller's, of pgx or of
// database/sql, and remembers which keys such a transaction has locked shared.
package usertx

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// A Tx is a transaction of the caller's.
type Tx interface {
	// Run runs one statement, given as its text, in one round trip.
	Run(ctx context.Context, text string, args ...any) (Reply, error)

	// RunBlock runs a DO block with the arguments of tx/ask.sql, in one round trip.
	RunBlock(ctx context.Context, block statements.Name, args ...any) (Reply, error)

	// Row runs a statement that yields one value, and scans that into dest.
	Row(ctx context.Context, text string, dest any, args ...any) error

	// Shares remembers the keys that it locks shared.
	Shares() Shares

	// Database says where the transaction is, if its driver tells.
	Database() string

	// Server remembers whether its server keeps locks.
	Server() Server

	// Engine names the server if it is known to be no PostgreSQL.
	Engine() string
}

// pgxTx is a transaction of pgx.
type pgxTx struct{ pgx.Tx }

// Pgx returns a transaction of pgx; nil for nil.
func Pgx(tx pgx.Tx) Tx {
	if tx == nil {
		return nil
	}
	return pgxTx{tx}
}

func (tx pgxTx) Run(ctx context.Context, text string, args ...any) (Reply, error) {
	tag, err := tx.Exec(ctx, text, args...)
	return tx.reply(ctx, tag, err)
}

func (tx pgxTx) RunBlock(ctx context.Context, block statements.Name, args ...any) (Reply, error) {
	batch := &pgx.Batch{}
	if len(args) > 0 {
		batch.Queue(statements.TxAsk.Text(), args...)
	}
	batch.Queue(block.Text())
	batch.Queue(statements.TxAnswer.Text())
	results := tx.SendBatch(ctx, batch)
	var tag pgconn.CommandTag
	var err error
	for range batch.Len() {
		if tag, err = results.Exec(); err != nil {
			break
		}
	}
	if closing := results.Close(); err == nil {
		err = closing
	}
	return tx.reply(ctx, tag, err)
}

// reply refuses a grant outside a transaction.
func (tx pgxTx) reply(ctx context.Context, tag pgconn.CommandTag, err error) (Reply, error) {
	switch conn := tx.Conn(); {
	case errors.Is(err, pgx.ErrTxClosed):
		err = fmt.Errorf("%w: %w", errEnded, err)
	case err == nil && conn != nil && conn.PgConn().TxStatus() == 'I':
		err = errNone
	}
	return tag.RowsAffected(), lockerr.WithContextError(ctx, err)
}

func (tx pgxTx) Row(ctx context.Context, text string, dest any, args ...any) error {
	return lockerr.WithContextError(ctx, tx.QueryRow(ctx, text, args...).Scan(dest))
}

func (tx pgxTx) Database() string {
	conn := tx.Conn()
	if conn == nil {
		return ""
	}
	c := conn.Config()
	return PlaceOf(&c.Config)
}

// PlaceOf names a database and its server.
func PlaceOf(c *pgconn.Config) string { return fmt.Sprintf("%q at %s:%d", c.Database, c.Host, c.Port) }

func (tx pgxTx) Server() Server { return Server{conn: tx.Conn()} }

func (tx pgxTx) Engine() string {
	conn := tx.Conn()
	if conn == nil {
		return ""
	}
	return dbconn.Engine(conn.PgConn())
}

func (tx pgxTx) Shares() Shares {
	conn := tx.Conn()
	if conn == nil {
		return Shares{}
	}
	return sharesOf(conn) // a nested transaction has the connection in common with its parent
}

// The errors of a transaction in which nothing can be locked.
var (
	errEnded = errors.New("tx was committed or rolled back; pass a transaction that is open")
	errNone  = errors.New("tx is in no transaction: a statement sent through it has ended it, or none was begun, and what is locked would be free at once; begin one with BeginTx, and end it with Commit or Rollback alone")
)

// A Reply is the answer of a statement that locks: the number of its rows.
type Reply = int64

// What a statement may answer.
const (
	Refused Reply = iota
	Granted
	GrantedOnSnapshot // the transaction keeps the snapshot it has
	Standby
)

// Elsewhere adds to the error of a fence where the lock is, if the transaction may
// be somewhere else. It is not refused before: through a pooler one database can
// have two names.
func Elsewhere(err error, tx interface{ Database() string }, config *pgconn.Config) error {
	if !errors.Is(err, lockerr.ErrLost) && !errors.Is(err, lockerr.ErrSchema) {
		return err
	}
	here := PlaceOf(config)
	switch there := tx.Database(); there {
	case "":
		return fmt.Errorf("%w (the lock is in database %s)", err, here)
	case here:
		return err
	default:
		return fmt.Errorf("%w (tx is on database %s, the lock in %s)", err, there, here)
	}
}
