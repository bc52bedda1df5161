package dbconn

import (
	"cmp"
	"context"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/place"
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

	Async bool // that of the [Session]

	Tracer pgx.QueryTracer // the caller's, for Answer; nil: none
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
	return q.Together(ctx, nil, q.withSettings(Step{SQL: sql, Args: args})...)
}

// withSettings returns the statements that make a pooler's connection fit for a step, and the
// step.
func (q Querier) withSettings(step Step) []Step {
	const local = true
	all := []Step{{SQL: statements.ConnSession.Text(), Args: []any{local}}, {SQL: statements.ConnSearchPath.Text(), Args: []any{local}}, step}
	if q.Async {
		all = slices.Insert(all, 1, Step{SQL: statements.ConnAsync.Text(), Args: []any{local}})
	}
	if q.OtherDefaults {
		return InTransaction(statements.ConnReadWrite, all...)
	}
	return all
}

// InTransaction returns the statements of a batch that is one transaction with this access mode,
// ConnReadOnly or ConnReadWrite, and READ COMMITTED, whatever the role's defaults.
func InTransaction(access statements.Name, all ...Step) []Step {
	return append([]Step{{SQL: statements.ConnReadCommitted.Text()}, {SQL: access.Text()}}, all...)
}

// Reading runs statements that only read, in one transaction whose isolation and access mode
// are the same whatever the role's defaults, and returns the rows of the last one: on a standby
// the server refuses every statement of a role whose default is SERIALIZABLE.
func (q Querier) Reading(ctx context.Context, all ...Step) pgx.Rows {
	return q.Together(ctx, binaryFormat, InTransaction(statements.ConnReadOnly, all...)...)
}

// Write runs a statement that writes and yields one row, which it scans into into, in a
// transaction that may write whatever the role's defaults.
func (q Querier) Write(ctx context.Context, sql string, args []any, into ...any) error {
	rows := q.Together(ctx, binaryFormat, InTransaction(statements.ConnReadWrite, Step{SQL: sql, Args: args})...)
	_, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) { return struct{}{}, row.Scan(into...) })
	return lockerr.OnStandby(err)
}

// Look finds out where pgxlock is, on a connection whose search_path is still that of its role.
// named is the schema that the caller names, "" for none.
func (q Querier) Look(ctx context.Context, named string) (place.Found, error) {
	return pgx.CollectExactlyOneRow(q.Reading(ctx, lookStep(named)), func(row pgx.CollectableRow) (place.Found, error) { return place.Read(row.Scan) })
}

// lookStep is the statement of Look.
func lookStep(named string) Step { return Step{SQL: place.LookSQL, Args: []any{named}} }

// binaryFormat is the format of Arguments, and of the values that Answer and Reading read.
var binaryFormat = []int16{pgx.BinaryFormatCode}

// Answer runs a statement for many entries, with our settings, and reads the one row of its
// answer. What it did is committed if there is no error. The values are valid only in read.
func (q Querier) Answer(ctx context.Context, sql string, args *Arguments, read func(values [][]byte) error) (err error) {
	if !q.Direct {
		rows := q.Together(ctx, binaryFormat, q.withSettings(Step{SQL: sql, Arguments: args})...)
		defer rows.Close()
		return oneRow(rows.Next, rows.RawValues, read, func() error {
			rows.Close()
			return rows.Err()
		})
	}
	if q.Tracer != nil {
		ctx = q.Tracer.TraceQueryStart(ctx, q.Conn, pgx.TraceQueryStartData{SQL: sql, Args: args.traced()})
		defer func() { q.Tracer.TraceQueryEnd(ctx, q.Conn, pgx.TraceQueryEndData{Err: err}) }()
	}
	statement, err := q.Conn.Prepare(ctx, sql, sql) // sends nothing if it is prepared
	if err != nil {
		return err
	}
	rows := q.Conn.PgConn().ExecStatement(ctx, statement, args.values(), binaryFormat, binaryFormat)
	err = oneRow(rows.NextRow, rows.Values, read, func() error {
		_, err := rows.Close()
		return err
	})
	if err != nil && !q.Conn.IsClosed() {
		_ = q.Conn.Deallocate(ctx, sql) // after a migration it may be another statement
	}
	return err
}

// oneRow reads the only row of an answer.
func oneRow(next func() bool, values func() [][]byte, read func([][]byte) error, end func() error) error {
	var unread error
	rows := 0
	for ; next(); rows++ {
		unread = cmp.Or(unread, read(values()))
	}
	if err := end(); err != nil {
		return err // of the statement, or of the commit
	}
	if rows != 1 {
		return ErrForeign
	}
	return unread
}

// A Step is a statement with what it is given, as Args or as Arguments.
type Step struct {
	SQL       string
	Args      []any
	Arguments *Arguments
}

// Together runs statements, prepared by nobody, and returns the rows of the last one in
// these formats. All until the Sync is one transaction, without BEGIN and COMMIT: a pooler in
// statement mode hangs up when it sees that one is left open, as by an error.
func (q Querier) Together(ctx context.Context, formats []int16, all ...Step) pgx.Rows {
	batch := &pgconn.Batch{}
	for _, s := range all {
		if s.Arguments != nil {
			batch.ExecParams(s.SQL, s.Arguments.values(), nil, binaryFormat, formats)
			continue
		}
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
