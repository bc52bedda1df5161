package stacks

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
)

// PayWithPgx makes a payment of what the request says, once for each key, and returns the answer.
func PayWithPgx(pool *pgxpool.Pool) Answerer {
	return func(ctx context.Context, key string, request []byte) (answer []byte, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			answer, err = pgxlock.AnswerTx(ctx, tx, key, request, func() ([]byte, error) {
				var id int64
				err := tx.QueryRow(ctx, "INSERT INTO payments (amount) VALUES ($1::text::bigint) RETURNING id", string(request)).Scan(&id)
				return fmt.Appendf(nil, `{"payment":%d}`, id), err
			}, pgxlock.NoWait, pgxlock.Retention(24*time.Hour))
			return err
		})
		return answer, err
	}
}

// PayWithSQL is PayWithPgx with database/sql.
func PayWithSQL(db *sql.DB) Answerer {
	return func(ctx context.Context, key string, request []byte) (answer []byte, err error) {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return nil, err
		}
		defer tx.Rollback()

		answer, err = pgxlock.AnswerSQLTx(ctx, tx, key, request, func() ([]byte, error) {
			var id int64
			err := tx.QueryRowContext(ctx, "INSERT INTO payments (amount) VALUES ($1::text::bigint) RETURNING id", string(request)).Scan(&id)
			return fmt.Appendf(nil, `{"payment":%d}`, id), err
		}, pgxlock.NoWait, pgxlock.Retention(24*time.Hour))
		if err != nil {
			return nil, err
		}
		return answer, tx.Commit()
	}
}

// An Answerer does what a request asks for, unless that was done under the key.
type Answerer func(ctx context.Context, key string, request []byte) (answer []byte, err error)

// Idempotent handles a POST that clients repeat with the same Idempotency-Key until they have a
// response (draft-ietf-httpapi-idempotency-key-header).
func Idempotent(do Answerer) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		user, _, _ := r.BasicAuth()
		key := r.Header.Get("Idempotency-Key")
		request, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<16))
		if err != nil || key == "" || len(user+key) > 200 {
			http.Error(w, "a short body, and an Idempotency-Key, are required", http.StatusBadRequest)
			return
		}
		answer, err := do(r.Context(), fmt.Sprintf("pay:%q:%s", user, key), request)
		switch {
		case errors.Is(err, pgxlock.ErrNotAcquired):
			http.Error(w, "a request with this key is in progress", http.StatusConflict)
		case errors.Is(err, pgxlock.ErrOtherRequest):
			http.Error(w, "the key was used for another request", http.StatusUnprocessableEntity)
		case err != nil:
			http.Error(w, "try again", http.StatusServiceUnavailable)
		default:
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			_, _ = w.Write(answer)
		}
	}
}
