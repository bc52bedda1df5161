// Package usertx runs our statements in a transaction of the caller's, of pgx or of
// database/sql, and remembers which keys such a transaction has locked shared.
package usertx

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// A Tx is a transaction of the caller's.
type Tx interface {
	// Run runs one statement, in one round trip.
	Run(ctx context.Context, name statements.Name, args ...any) (Reply, error)

	// TryIn opens a savepoint, runs the statement, and, if keep is set, releases
	// the savepoint if that succeeded; all in one round trip.
	TryIn(ctx context.Context, keep bool, name statements.Name, args ...any) (Reply, error)

	// Row runs a statement, given as its text, that yields one value, and scans that
	// into dest.
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

// A Refusal is an error that says no and must not abort the transaction.
type Refusal struct {
	State string // its SQLSTATE
	Means error
}

// Tentatively runs the statement in a savepoint. If it is refused, a second round
// trip brings the transaction back to where it was.
func Tentatively(ctx context.Context, tx Tx, no Refusal, name statements.Name, args ...any) (Reply, error) {
	got, err := tx.TryIn(ctx, true, name, args...)
	if err == nil || lockerr.SQLState(err) != no.State {
		return got, err
	}
	if err := Finish(ctx, tx, statements.TxRollbackSavepoint); err != nil {
		// Not no.Means itself, so that it is not taken for a refusal.
		return got, fmt.Errorf("%s, and the transaction cannot go on: %w", no.Means.Error(), lockerr.WithContextError(ctx, err))
	}
	return got, no.Means
}

// Finish ends the savepoint, also if ctx has ended: the transaction must not be left in the
// middle of it.
func Finish(ctx context.Context, tx Tx, name statements.Name) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), dbconn.Timeout)
	defer cancel()
	_, err := tx.Run(ctx, name)
	return err
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

// run sends what has no arguments as a plain text, which may hold more than one
// statement.
func (tx pgxTx) Run(ctx context.Context, name statements.Name, args ...any) (Reply, error) {
	tag, err := tx.Exec(ctx, name.Text(), args...)
	if conn := tx.Conn(); err == nil && conn != nil && conn.PgConn().TxStatus() == 'I' {
		err = errors.New("a statement has already ended the transaction, so a lock in it would end at once")
	}
	return Reply(tag.RowsAffected()), err
}

func (tx pgxTx) TryIn(ctx context.Context, keep bool, name statements.Name, args ...any) (Reply, error) {
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
	return Reply(tag.RowsAffected()), err
}

func (tx pgxTx) Row(ctx context.Context, text string, dest any, args ...any) error {
	return tx.QueryRow(ctx, text, args...).Scan(dest)
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

// sqlTx is a transaction of database/sql. The arguments are written into the
// text: with parameters lib/pq takes two round trips, and no driver can send more
// than one statement. There all that is told is the number of rows of the last.
type sqlTx struct{ *sql.Tx }

// SQL returns a transaction of database/sql; nil for nil.
func SQL(tx *sql.Tx) Tx {
	if tx == nil {
		return nil
	}
	return sqlTx{tx}
}

func (tx sqlTx) Run(ctx context.Context, name statements.Name, args ...any) (Reply, error) {
	return tx.send(ctx, literal(name.Text(), args))
}

func (tx sqlTx) TryIn(ctx context.Context, keep bool, name statements.Name, args ...any) (Reply, error) {
	texts := []string{statements.TxSavepoint.Text(), literal(name.Text(), args)}
	if keep {
		texts = append(texts, statements.TxReleaseSavepoint.Text(), statements.TxReply.Text())
	}
	return tx.send(ctx, strings.Join(texts, ";\n"))
}

func (tx sqlTx) send(ctx context.Context, text string) (Reply, error) {
	result, err := tx.ExecContext(ctx, text)
	if err != nil {
		return 0, lockerr.WithContextError(ctx, err)
	}
	rows, err := result.RowsAffected()
	return Reply(rows), err
}

// Row sends the arguments as parameters, for they may be texts of the caller's.
func (tx sqlTx) Row(ctx context.Context, text string, dest any, args ...any) error {
	return lockerr.WithContextError(ctx, tx.QueryRowContext(ctx, text, args...).Scan(dest))
}

// Database returns "": database/sql does not tell.
func (tx sqlTx) Database() string { return "" }

// Server is known by the sql.DB, which a transaction of database/sql has in a field and does not tell.
func (tx sqlTx) Server() Server {
	field := reflect.ValueOf(tx.Tx).Elem().FieldByName("db")
	if !field.IsValid() || field.Type() != reflect.TypeFor[*sql.DB]() {
		return Server{} // in a later release of Go: then it is asked each time
	}
	return Server{db: (*sql.DB)(field.UnsafePointer())}
}

// Engine returns "": database/sql does not tell.
func (tx sqlTx) Engine() string { return "" }

func (tx sqlTx) Shares() Shares { return sharesOf(tx.Tx) }

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

// A Reply is the answer of a statement that locks: the number of its rows.
type Reply int64

// What a statement may answer.
const (
	Refused Reply = iota
	Granted
	GrantedOnSnapshot // the transaction keeps the snapshot it has
	Standby
)
