package usertx

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/sql"
)

// A sqlRunner is what is called of the root package's SQLTx.
type sqlRunner interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// sqlTx is a transaction of database/sql, or of a library on top of it. The arguments are written
// into the text: no driver can send more than one statement with parameters, and the transactions of
// bun drop them. The only result is the last statement's row count.
type sqlTx struct {
	sqlRunner
	tx *sql.Tx // beneath it; nil: not known
}

// SQL returns a transaction of database/sql; nil for nil.
func SQL(tx sqlRunner) Tx {
	v := reflect.ValueOf(tx)
	if !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return nil
	}
	known, ok := beneath(v)
	switch {
	case !ok:
		return sqlTx{sqlRunner: tx}
	case known == nil:
		return nil
	}
	return sqlTx{known, known}
}

// beneath returns the *sql.Tx that a transaction is, or that it has in its field Tx, as those of bun,
// sqlx and, with PrepareStmt, GORM: it changes no text, prepares nothing, and is known again by its
// address.
func beneath(v reflect.Value) (tx *sql.Tx, ok bool) {
	for range 8 { // the last of a chain that is no circle
		if tx, ok = v.Interface().(*sql.Tx); ok {
			return tx, true
		}
		for v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
			if v = v.Elem(); !v.IsValid() {
				return nil, false
			}
		}
		if v.Kind() != reflect.Struct {
			return nil, false
		}
		field, found := v.Type().FieldByName("Tx")
		if !found || !field.IsExported() || len(field.Index) > 1 {
			return nil, false
		}
		v = v.FieldByIndex(field.Index)
	}
	return nil, false
}

func (tx sqlTx) Run(ctx context.Context, text string, args ...any) (Reply, error) {
	return tx.send(ctx, Written(text, args...))
}

func (tx sqlTx) RunBlock(ctx context.Context, block statements.Name, args ...any) (Reply, error) {
	texts := []string{block.Text(), statements.TxAnswer.Text()}
	if len(args) > 0 {
		texts = slices.Insert(texts, 0, Written(statements.TxAsk.Text(), args...))
	}
	return tx.send(ctx, texts...)
}

// send first asks whether the transaction is open: a statement of the caller's may have
// ended it.
func (tx sqlTx) send(ctx context.Context, texts ...string) (Reply, error) {
	text := strings.Join(append([]string{statements.TxInTransaction.Text()}, texts...), ";\n")
	result, err := tx.ExecContext(ctx, text)
	if err != nil {
		return 0, tx.explain(ctx, err)
	}
	return result.RowsAffected()
}

func (tx sqlTx) Row(ctx context.Context, text string, dest any, args ...any) error {
	var protocol []any
	if tx.driver() == pgxDriver { // it would prepare each text, and each key makes another one
		protocol = []any{pgx.QueryExecModeExec} // the simple protocol wants settings that the program may have changed
	}
	rows, err := tx.QueryContext(ctx, Written(text, args...), protocol...)
	if err != nil {
		return tx.explain(ctx, err)
	}
	defer func() { _ = rows.Close() }()
	if !rows.Next() {
		return cmp.Or(tx.explain(ctx, rows.Err()), sql.ErrNoRows)
	}
	if err := rows.Scan(dest); err != nil {
		return err
	}
	return tx.explain(ctx, rows.Close())
}

// explain says what is wrong with tx, if that is why a statement failed.
func (tx sqlTx) explain(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return lockerr.WithContextError(ctx, err)
	}
	state := lockerr.SQLState(err)
	switch of := tx.driver(); {
	case errors.Is(err, sql.ErrTxDone):
		return fmt.Errorf("%w: %w", errEnded, err)
	case state == lockerr.StateNoTransaction:
		return fmt.Errorf("%w: %w", errNone, err)
	case of != pgxDriver && of != "*pq.Driver" && (state == lockerr.StateSyntax || state == "" && !lockerr.Unreachable(err)):
		return fmt.Errorf("tx is of %s; locks need PostgreSQL, and the driver of pgx, lib/pq or another one that sends several statements in one request and prepares none: %w: %w", of, errors.ErrUnsupported, err)
	}
	return err
}

const pgxDriver = "*stdlib.Driver"

// driver names the driver, or, where that is not known, the library.
func (tx sqlTx) driver() string {
	if db := tx.Server().db; db != nil {
		return fmt.Sprintf("%T", db.Driver())
	}
	return fmt.Sprintf("%T", tx.sqlRunner)
}

// Database returns "": database/sql does not say.
func (tx sqlTx) Database() string { return "" }

// Server is known by the sql.DB, which a *sql.Tx has in a field that it does not export.
func (tx sqlTx) Server() Server {
	if tx.tx == nil {
		return Server{}
	}
	field := reflect.ValueOf(tx.tx).Elem().FieldByName("db")
	if !field.IsValid() || field.Type() != reflect.TypeFor[*sql.DB]() {
		return Server{} // in a later release of Go: then it is asked each time
	}
	return Server{db: (*sql.DB)(field.UnsafePointer())}
}

// Engine returns "": database/sql does not say.
func (tx sqlTx) Engine() string { return "" }

func (tx sqlTx) Shares() Shares {
	if tx.tx == nil {
		return Shares{}
	}
	return sharesOf(tx.tx)
}

var (
	parameter = regexp.MustCompile(`\$[0-9]+`)
	plain     = regexp.MustCompile(`^[0-9A-Za-z _.,:/+{}-]*$`)
)

// Written returns a statement with the arguments in place of its parameters, in one pass: what is in
// an argument is no parameter.
func Written(text string, args ...any) string {
	return parameter.ReplaceAllStringFunc(text, func(p string) string {
		i, _ := strconv.Atoi(p[1:])
		return literal(args[i-1])
	})
}

// literal writes an argument in characters that are the same in every encoding and mean nothing
// between quotes, to the server under any setting, nor to what rewrites ?, $1, @name, % or \ on the way
// there, nor in a comment, which they cannot end. Bytes are sent as hexadecimal digits; so is the UTF-8
// of a text that has other characters, which the server checks and converts to the encoding of the database.
func literal(arg any) string {
	if bytes, ok := arg.([]byte); ok {
		return "pg_catalog.decode('" + hex.EncodeToString(bytes) + "', 'hex')"
	}
	written := fmt.Sprint(arg)
	switch v := arg.(type) {
	case *float64:
		if v == nil {
			return "NULL"
		}
		written = fmt.Sprint(*v)
	case []int64: // [1 2]
		written = "{" + strings.Join(strings.Fields(strings.Trim(written, "[]")), ",") + "}"
	}
	if !plain.MatchString(written) {
		return "pg_catalog.convert_from(" + literal([]byte(written)) + ", 'UTF8')"
	}
	return "'" + written + "'" // a number too: the least one has a minus
}
