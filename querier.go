package pgxlock

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/sql"
)

// This file runs one statement on a session, in the setting that it needs: the
// connection's own, or that of its transaction where the connection is a pooler's.

// querier runs statements on a session's connection.
type querier struct {
	conn *pgx.Conn

	// direct says that nobody else uses the server's end of the connection. A
	// pooler may hand each transaction to another one, where a prepared statement
	// would be missing and a setting would stay behind.
	direct bool

	// otherDefaults says that the role's transactions are not READ COMMITTED and
	// READ WRITE by themselves.
	otherDefaults bool
}

func (q querier) args(args []any) []any {
	mode := pgx.QueryExecModeExec
	if q.direct {
		mode = pgx.QueryExecModeCacheStatement
	}
	return append([]any{mode}, args...)
}

func (q querier) row(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.conn.QueryRow(ctx, sql, q.args(args)...)
}

func (q querier) exec(ctx context.Context, sql string, args ...any) error {
	_, err := q.conn.Exec(ctx, sql, q.args(args)...)
	return err
}

// query runs a statement with our settings. What it did is committed when the
// rows have been read without an error.
func (q querier) query(ctx context.Context, sql string, args ...any) pgx.Rows {
	if q.direct {
		rows, _ := q.conn.Query(ctx, sql, q.args(args)...) // the rows carry the error
		return rows
	}
	const local = true
	all := []step{{statements.ConnSession.Text(), []any{local}}, {statements.ConnSearchPath.Text(), []any{local}}, {sql, args}}
	if q.otherDefaults {
		all = append([]step{{sql: statements.ConnSetTransaction.Text()}}, all...)
	}
	return q.together(ctx, nil, all...)
}

// A step is a statement with what it is given.
type step struct {
	sql  string
	args []any
}

// together runs statements, prepared by nobody, and returns the rows of the last one in
// these formats. All until the Sync is one transaction, without BEGIN and COMMIT: a pooler in
// statement mode hangs up when it sees that one is left open, as by an error.
func (q querier) together(ctx context.Context, formats []int16, all ...step) pgx.Rows {
	batch := &pgconn.Batch{}
	for _, s := range all {
		var arguments pgx.ExtendedQueryBuilder
		if err := arguments.Build(q.conn.TypeMap(), nil, s.args); err != nil {
			return &pooledRows{err: err}
		}
		batch.ExecParams(s.sql, arguments.ParamValues, nil, arguments.ParamFormats, formats)
	}
	results := q.conn.PgConn().ExecBatch(ctx, batch)
	for range len(all) - 1 {
		if results.NextResult() {
			_, _ = results.ResultReader().Close() // an error of it ends the batch
		}
	}
	rows := &pooledRows{results: results}
	if results.NextResult() {
		rows.Rows = pgx.RowsFromResultReader(q.conn.TypeMap(), results.ResultReader())
	} else {
		rows.Close()
	}
	return rows
}

// pooledRows are the rows of a batch's last statement. Their error is also that of
// the commit, which happens after the last of them.
type pooledRows struct {
	pgx.Rows                           // nil if the statement failed
	results  *pgconn.MultiResultReader // nil once all has been read
	err      error
}

func (r *pooledRows) Next() bool {
	if r.Rows != nil && r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *pooledRows) Close() {
	if r.results == nil {
		return
	}
	if r.Rows != nil {
		r.Rows.Close()
	}
	r.err = r.results.Close() // the first error of all
	r.results = nil
}

func (r *pooledRows) Err() error {
	if r.err == nil && r.Rows != nil {
		return r.Rows.Err()
	}
	return r.err
}
