package pgxlock

import (
	"context"
	"database/sql"
)

// SQLTx is a transaction of database/sql: a [*sql.Tx], or what a library makes of one, such as
// bun.Tx, *sqlx.Tx, the Tx that ent generates with its feature sql/execquery, and GORM's ConnPool
// in a transaction. A *sql.DB or *sql.Conn is none: what is locked there would be free at once.
//
// The driver is that of pgx or lib/pq, or another one for PostgreSQL that sends several
// statements in one request and has errors with a method SQLState. Statements go to the *sql.Tx
// in the field Tx, if there is one, past hooks of the library. If ctx ends during a wait, pgx
// and lib/pq close the connection.
type SQLTx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	Commit() error
	Rollback() error
}
