package dbconn

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/sql"
)

// A Querier runs statements on a connection, with the settings that they need: the
// connection's own, or that of the transaction where the connection is a pooler's.
type Querier struct {
	Conn *pgx.Conn

	// Direct says that nobody else uses the server's end of the connection. A
	// pooler may hand each transaction to another one, where a prepared statement
	// would be missing and a setting would stay behind.
	Direct bool

	// OtherDefaults says that the role's transactions are not READ COMMITTED and
	// READ WRITE by themselves.
	OtherDefaults bool

	// Async is that of the [Session].
	Async bool
}

// Args returns the arguments of a statement with the mode in which it must be sent.
func (q Querier) Args(args []any) []any {
	mode := pgx.QueryExecModeExec
	if q.Direct {
		mode = pgx.QueryExecModeCacheStatement
	}
	return append([]any{mode}, args...)
}

// Row runs a statement that yields one row.
func (q Querier) Row(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.Conn.QueryRow(ctx, sql, q.Args(args)...)
}

// Exec runs a statement that yields none.
func (q Querier) Exec(ctx context.Context, sql string, args ...any) error {
	_, err := q.Conn.Exec(ctx, sql, q.Args(args)...)
	return err
}

// Query runs a statement with our settings. What it did is committed when the
// rows have been read without an error.
func (q Querier) Query(ctx context.Context, sql string, args ...any) pgx.Rows {
	if q.Direct {
		rows, _ := q.Conn.Query(ctx, sql, q.Args(args)...) // the rows carry the error
		return rows
	}
	const local = true
	all := []Step{{statements.ConnSession.Text(), []any{local}}, {statements.ConnSearchPath.Text(), []any{local}}, {sql, args}}
	if q.Async {
		all = slices.Insert(all, 1, Step{statements.ConnAsync.Text(), []any{local}})
	}
	if q.OtherDefaults {
		all = append([]Step{{SQL: statements.ConnSetTransaction.Text()}}, all...)
	}
	return q.Together(ctx, nil, all...)
}

// A Step is a statement with what it is given.
type Step struct {
	SQL  string
	Args []any
}

// Together runs statements, prepared by nobody, and returns the rows of the last one in
// these formats. All until the Sync is one transaction, without BEGIN and COMMIT: a pooler in
// statement mode hangs up when it sees that one is left open, as by an error.
func (q Querier) Together(ctx context.Context, formats []int16, all ...Step) pgx.Rows {
	batch := &pgconn.Batch{}
	for _, s := range all {
		var arguments pgx.ExtendedQueryBuilder
		if err := arguments.Build(q.Conn.TypeMap(), nil, s.Args); err != nil {
			return &pooledRows{err: err}
		}
		batch.ExecParams(s.SQL, arguments.ParamValues, nil, arguments.ParamFormats, formats)
	}
	results := q.Conn.PgConn().ExecBatch(ctx, batch)
	for range len(all) - 1 {
		if results.NextResult() {
			_, _ = results.ResultReader().Close() // an error of it ends the batch
		}
	}
	rows := &pooledRows{results: results}
	if results.NextResult() {
		rows.Rows = pgx.RowsFromResultReader(q.Conn.TypeMap(), results.ResultReader())
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
