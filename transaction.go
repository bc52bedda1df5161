package pgxlock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// This file runs our statements in a transaction of the caller's, of pgx or of
// database/sql.

// A transaction is the caller's. What it is asked to run are the files of sql/ by
// their names.
type transaction interface {
	// run runs one statement, in one round trip.
	run(ctx context.Context, name statements.Name, args ...any) (reply, error)

	// tryIn opens a savepoint, runs the statement, and, if keep is set, releases
	// the savepoint if that succeeded; all in one round trip.
	tryIn(ctx context.Context, keep bool, name statements.Name, args ...any) (reply, error)

	// row runs a statement, which is given as its text, that answers with one
	// value, and scans that into dest.
	row(ctx context.Context, text string, dest any, args ...any) error

	// shares are of the keys that it locks.
	shares() shares

	// database says where the transaction is, if its driver tells.
	database() string
}

// refusal is an error that says no and shall not abort the transaction.
type refusal struct {
	state string // its SQLSTATE
	means error
}

// tentatively runs the statement in a savepoint. If it is refused, a second round
// trip brings the transaction back to where it was.
func tentatively(ctx context.Context, tx transaction, no refusal, name statements.Name, args ...any) (reply, error) {
	got, err := tx.tryIn(ctx, true, name, args...)
	if err == nil || lockerr.SQLState(err) != no.state {
		return got, err
	}
	if err := finish(ctx, tx, statements.TxRollbackSavepoint); err != nil {
		// Not no.means itself, so that it is not taken for a refusal.
		return got, fmt.Errorf("%s, and the transaction cannot go on: %w", no.means.Error(), lockerr.WithContextError(ctx, err))
	}
	return got, no.means
}

// finish ends the savepoint, also if ctx has ended: the transaction shall not be
// left in the middle of it.
func finish(ctx context.Context, tx transaction, name statements.Name) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dbconn.Timeout)
	defer cancel()
	_, err := tx.run(ctx, name)
	return err
}

// pgxTx is a transaction of pgx.
type pgxTx struct{ pgx.Tx }

// newPgxTx returns nil for nil.
func newPgxTx(tx pgx.Tx) transaction {
	if tx == nil {
		return nil
	}
	return pgxTx{tx}
}

// run sends what has no arguments as a plain text, which may hold more than one
// statement.
func (tx pgxTx) run(ctx context.Context, name statements.Name, args ...any) (reply, error) {
	tag, err := tx.Exec(ctx, name.Text(), args...)
	if conn := tx.Conn(); err == nil && conn != nil && conn.PgConn().TxStatus() == 'I' {
		err = errors.New("the transaction has been ended by a statement of its own, and a lock would last for nothing")
	}
	return reply(tag.RowsAffected()), err
}

func (tx pgxTx) tryIn(ctx context.Context, keep bool, name statements.Name, args ...any) (reply, error) {
	batch := &pgx.Batch{}
	batch.Queue(statements.TxSavepoint.Text())
	batch.Queue(name.Text(), args...)
	if keep {
		batch.Queue(statements.TxReleaseSavepoint.Text())
	}
	results := tx.SendBatch(ctx, batch)
	_, err := results.Exec()
	var tag pgconn.CommandTag
	if err == nil {
		tag, err = results.Exec()
	}
	if closing := results.Close(); err == nil {
		err = closing
	}
	return reply(tag.RowsAffected()), err
}

func (tx pgxTx) row(ctx context.Context, text string, dest any, args ...any) error {
	return tx.QueryRow(ctx, text, args...).Scan(dest)
}

func (tx pgxTx) database() string {
	conn := tx.Conn()
	if conn == nil {
		return ""
	}
	c := conn.Config()
	return placeOf(&c.Config)
}

// placeOf names a database and its server.
func placeOf(c *pgconn.Config) string { return fmt.Sprintf("%q at %s:%d", c.Database, c.Host, c.Port) }

func (tx pgxTx) shares() shares {
	conn := tx.Conn()
	if conn == nil {
		return shares{}
	}
	return sharesOf(conn) // a nested transaction has the connection in common with its parent
}

// sqlTx is a transaction of database/sql. The arguments are written into the
// text: with parameters lib/pq takes two round trips, and no driver can send more
// than one statement. There all that is told is the number of rows of the last.
type sqlTx struct{ *sql.Tx }

// newSQLTx returns nil for nil.
func newSQLTx(tx *sql.Tx) transaction {
	if tx == nil {
		return nil
	}
	return sqlTx{tx}
}

func (tx sqlTx) run(ctx context.Context, name statements.Name, args ...any) (reply, error) {
	return tx.send(ctx, literal(name.Text(), args))
}

func (tx sqlTx) tryIn(ctx context.Context, keep bool, name statements.Name, args ...any) (reply, error) {
	texts := []string{statements.TxSavepoint.Text(), literal(name.Text(), args)}
	if keep {
		texts = append(texts, statements.TxReleaseSavepoint.Text(), statements.TxReply.Text())
	}
	return tx.send(ctx, strings.Join(texts, ";\n"))
}

func (tx sqlTx) send(ctx context.Context, text string) (reply, error) {
	result, err := tx.ExecContext(ctx, text)
	if err != nil {
		return 0, lockerr.WithContextError(ctx, err)
	}
	rows, err := result.RowsAffected()
	return reply(rows), err
}

// row sends the arguments as parameters, for they may be texts of the caller's.
func (tx sqlTx) row(ctx context.Context, text string, dest any, args ...any) error {
	return lockerr.WithContextError(ctx, tx.QueryRowContext(ctx, text, args...).Scan(dest))
}

// database: database/sql does not tell.
func (tx sqlTx) database() string { return "" }

func (tx sqlTx) shares() shares { return sharesOf(tx.Tx) }

// literal writes the arguments into a statement. They are ours, and in quotes, so
// that the least of the numbers is none with a minus before it.
func literal(text string, args []any) string {
	for i, arg := range args {
		written := fmt.Sprint(arg)
		if _, ok := arg.([]int64); ok { // [1 2]
			written = "{" + strings.Join(strings.Fields(strings.Trim(written, "[]")), ",") + "}"
		}
		text = strings.ReplaceAll(text, "$"+strconv.Itoa(i+1), "'"+written+"'")
	}
	return text
}

// reply is what the statements that lock tell, by the number of their rows.
type reply int64

const (
	replyRefused reply = iota
	replyGranted
	replyGrantedOnSnapshot // the transaction keeps the snapshot it has
	replyStandby
)
