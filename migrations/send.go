package migrations

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock/internal/usertx"
)

// A step is a statement with what it is given.
type step struct {
	sql  string
	args []string
}

// steps returns a step for each text.
func steps(texts []string) (all []step) {
	for _, text := range texts {
		all = append(all, step{sql: text})
	}
	return all
}

// A sender runs steps in one transaction, and returns the rows of the last one as text.
type sender interface {
	send(ctx context.Context, all ...step) ([][][]byte, error)
}

// pgxSender makes each transaction one write to the server, without BEGIN and COMMIT: a pooler may be
// in statement mode.
type pgxSender struct{ conn *pgconn.PgConn }

func (s pgxSender) send(ctx context.Context, all ...step) ([][][]byte, error) {
	batch := &pgconn.Batch{}
	for _, s := range all {
		args := make([][]byte, len(s.args))
		for i, arg := range s.args {
			args[i] = []byte(arg)
		}
		batch.ExecParams(s.sql, args, nil, nil, nil)
	}
	results, err := s.conn.ExecBatch(ctx, batch).ReadAll()
	if err != nil {
		return nil, err
	}
	last := results[len(results)-1]
	return last.Rows, last.Err
}

type sqlSender struct{ db *sql.DB }

func (s sqlSender) send(ctx context.Context, all ...step) (rows [][][]byte, err error) {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	for i, s := range all {
		if len(s.args) > 0 {
			args := make([]any, len(s.args))
			for i, arg := range s.args {
				args[i] = arg
			}
			s.sql = usertx.Written(s.sql, args...)
		}
		if i < len(all)-1 {
			_, err = tx.ExecContext(ctx, s.sql)
		} else {
			rows, err = read(tx.QueryContext(ctx, s.sql))
		}
		if err != nil {
			return nil, err
		}
	}
	return rows, tx.Commit()
}

// read returns rows as the server writes them.
func read(rows *sql.Rows, err error) (all [][][]byte, _ error) {
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil {
		return nil, err
	}
	for rows.Next() {
		row, values, into := make([][]byte, len(columns)), make([]any, len(columns)), make([]any, len(columns))
		for i := range values {
			into[i] = &values[i]
		}
		if err := rows.Scan(into...); err != nil {
			return nil, err
		}
		for i, value := range values {
			switch v := value.(type) {
			case nil:
			case bool:
				row[i] = fmt.Append(nil, v)[:1]
			case []byte:
				row[i] = v
			default:
				row[i] = fmt.Append(nil, v)
			}
		}
		all = append(all, row)
	}
	return all, rows.Err()
}
