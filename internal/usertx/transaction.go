// Package usertx runs our statements in a transaction of the caller's, of pgx or of
// database/sql, and remembers which keys such a transaction has locked shared.
package usertx

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"slices"
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

	// RunBlock runs a DO block with the arguments of tx/ask.sql, in one round trip.
	RunBlock(ctx context.Context, block statements.Name, args ...any) (Reply, error)

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

// pgxTx is a transaction of pgx.
type pgxTx struct{ pgx.Tx }

// Pgx returns a transaction of pgx; nil for nil.
func Pgx(tx pgx.Tx) Tx {
	if tx == nil {
		return nil
	}
	return pgxTx{tx}
}

func (tx pgxTx) Run(ctx context.Context, name statements.Name, args ...any) (Reply, error) {
	tag, err := tx.Exec(ctx, name.Text(), args...)
	return tx.reply(tag, lockerr.WithContextError(ctx, err))
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
	return tx.reply(tag, lockerr.WithContextError(ctx, err))
}

// reply refuses a grant outside a transaction.
func (tx pgxTx) reply(tag pgconn.CommandTag, err error) (Reply, error) {
	if conn := tx.Conn(); err == nil && conn != nil && conn.PgConn().TxStatus() == 'I' {
		err = errors.New("a statement has already ended the transaction, so a lock in it would end at once")
	}
	return Reply(tag.RowsAffected()), err
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

func (tx sqlTx) RunBlock(ctx context.Context, block statements.Name, args ...any) (Reply, error) {
	texts := []string{block.Text(), statements.TxAnswer.Text()}
	if len(args) > 0 {
		texts = slices.Insert(texts, 0, literal(statements.TxAsk.Text(), args))
	}
	return tx.send(ctx, texts...)
}

// send first asks whether the transaction is open: a statement of the caller's may have
// ended it.
func (tx sqlTx) send(ctx context.Context, texts ...string) (Reply, error) {
	text := strings.Join(append([]string{statements.TxInTransaction.Text()}, texts...), ";\n")
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
