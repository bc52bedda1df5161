package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	rands "math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/readable"
	"github.com/pgxlock/pgxlock/internal/dbconn"
)

// The commands acquire, extend and release are for shell scripts. Such a lease belongs to the
// script and not to one of these processes: the command prints its holder id and its token,
// and the script passes them to the next command.

// errLost means that a lease was not held any more.
var errLost = errors.New("the lease is lost")

// busyError means that somebody else has the lease.
type busyError struct {
	key, holder string
	remaining   time.Duration
}

func (e *busyError) Error() string {
	if e.holder == "" {
		return fmt.Sprintf("acquire %q: somebody else is just acquiring it", e.key)
	}
	return fmt.Sprintf("acquire %q: held by %s for another %s", e.key, e.holder, readable.Duration(e.remaining))
}

// holding is a lease as a script needs it.
type holding struct {
	Key       string    `json:"key"`
	Holder    string    `json:"holder"`
	Token     int64     `json:"token"`
	ExpiresAt time.Time `json:"expires_at"`
}

func newAcquire() *cobra.Command {
	var t target
	var output format
	var holder, metadata string
	var ttl time.Duration
	var w waiting
	var c conflict
	cmd := &cobra.Command{
		Use:   "acquire KEY",
		Short: "Acquire a lease, and print its token and holder",
		Long: `Acquire a lease for a script, and print its fencing token and its holder id. The lease
lasts for --ttl, even if this process and the script end: extend it in time, and
release it.

If somebody else holds the lease, acquire exits with 75 (-E changes that): at once, or
after --wait. It polls while it waits.

If a signal ends acquire, no lease stays behind, unless --holder was given: acquire it
once more with the same --holder to see its token, and release it.`,
		Example: `  lease=$(pgxlock acquire nightly --ttl 5m) || exit
  token=${lease%% *} holder=${lease#* }
  ./backup.sh
  pgxlock release nightly --holder "$holder" --token "$token"

  pgxlock acquire nightly --ttl 5m --wait 30 -o json`,
		Args: oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cmp.Or(w.check(cmd.Flags()), c.check()); err != nil {
				return usageError{err}
			}
			quoted, err := json.Marshal(metadata)
			if err != nil {
				return err
			}
			if metadata == "" {
				quoted = []byte("{}")
			}
			// Else a reader that has gone ends us by SIGPIPE, with a lease that nobody knows.
			signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
			ours := holder == ""
			if ours {
				host, _ := os.Hostname()
				holder = fmt.Sprintf("%.60s:%d:%s", host, os.Getppid(), rand.Text())
			}
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				l, err := acquire(ctx, pool, statement("acquire", schema), args[0], holder, ttl, w.most, string(quoted))
				switch {
				case err != nil:
					return c.outcome(err)
				case ctx.Err() != nil:
					err = ctx.Err()
				case output == formatJSON:
					err = printJSON(cmd.OutOrStdout(), l)
				default:
					_, err = fmt.Fprintln(cmd.OutOrStdout(), l.Token, printable(l.Holder))
				}
				if err != nil && ours { // nobody was told of this holder, who could release it
					_, released := release(context.WithoutCancel(ctx), pool, schema, l)
					err = errors.Join(err, released)
				}
				return err
			})
		},
	}
	t.addFlags(cmd)
	output.addFlag(cmd)
	durationVar(cmd.Flags(), &ttl, "ttl", "", time.Minute, "how long the lease lasts unless it is extended")
	w.addFlags(cmd, "how long to wait for somebody else's lease (default: try once)", "try once, as without --wait")
	c.addFlags(cmd, exitBusy, "somebody else holds the lock")
	cmd.Flags().StringVar(&holder, "holder", "", "holder `id`; callers with the same id are the same holder (default: a new one)")
	cmd.Flags().StringVar(&metadata, "metadata", "", "`text` for operators to see")
	return cmd
}

// acquire tries until wait is over. ctx ends a wait, but no statement that was
// sent: what came of it would not be known.
func acquire(ctx context.Context, pool *pgxpool.Pool, sql, key, holder string, ttl, wait time.Duration, metadata string) (*holding, error) {
	deadline := time.Now().Add(wait)
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		var acquired bool
		var heldBy string
		var expires *time.Time // of an acquisition that is under way nothing is known
		var remaining float64
		l := &holding{Key: key, Holder: holder}
		err := pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
			return dbconn.Querier{Conn: conn.Conn()}.Write(context.WithoutCancel(ctx), sql, []any{key, holder, ttl.Seconds(), metadata},
				&acquired, &l.Token, &heldBy, &expires, &remaining)
		})
		if err != nil {
			return nil, err
		}
		if acquired {
			l.ExpiresAt = *expires
			return l, nil
		}
		left := time.Until(deadline)
		if left <= 0 {
			return nil, &busyError{key, heldBy, duration(math.Max(remaining, 0))}
		}
		select {
		case <-time.After(min(pause/2+rands.N(pause/2), left)): // jitter: waiters must not poll in step
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// release gives a lease back, and tells whether it was live.
func release(ctx context.Context, pool *pgxpool.Pool, schema string, l *holding) (live bool, err error) {
	err = write(ctx, pool, statement("release", schema), []any{l.Key, l.Holder, l.Token}, &live)
	return live, err
}

func newExtend() *cobra.Command {
	var t target
	var output format
	var l holding
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "extend KEY --holder ID --token N",
		Short: "Extend a lease",
		Long: `Extend a lease, so that it lasts for --ttl from now, and print when it expires. If the
lease is lost, extend exits with 80: stop the work that it protects.`,
		Example: `  pgxlock extend nightly --holder "$holder" --token "$token" --ttl 5m || exit`,
		Args:    oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			l.Key = args[0]
			if err := l.check(); err != nil {
				return err
			}
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				var expires *time.Time
				if err := write(ctx, pool, statement("extend", schema), []any{l.Key, l.Holder, l.Token, ttl.Seconds()}, &expires); err != nil {
					return err
				}
				if expires == nil {
					return fmt.Errorf("extend %q: %w: it expired, was released, evicted or taken over, or has another token; stop the work that it protects", l.Key, errLost)
				}
				l.ExpiresAt = *expires
				if output == formatJSON {
					return printJSON(cmd.OutOrStdout(), l)
				}
				_, err := fmt.Fprintln(cmd.OutOrStdout(), l.ExpiresAt.Format(time.RFC3339))
				return err
			})
		},
	}
	t.addFlags(cmd)
	output.addFlag(cmd)
	l.addFlags(cmd)
	durationVar(cmd.Flags(), &ttl, "ttl", "", time.Minute, "how long the lease lasts from now")
	return cmd
}

func newRelease() *cobra.Command {
	var t target
	var l holding
	cmd := &cobra.Command{
		Use:   "release KEY --holder ID --token N",
		Short: "Release a lease",
		Long: `Release a lease. If it had expired, release exits with 80: somebody else may have held
it meanwhile. While a transaction that fenced the lease is open, release exits with
75: release it again then.`,
		Example: `  pgxlock release nightly --holder "$holder" --token "$token"`,
		Args:    oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			l.Key = args[0]
			if err := l.check(); err != nil {
				return err
			}
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				live, err := release(ctx, pool, schema, &l)
				if err == nil && !live {
					err = fmt.Errorf("release %q: %w: it expired, was released, evicted or taken over, or has another token; somebody else may have held it meanwhile", l.Key, errLost)
				}
				return err
			})
		},
	}
	t.addFlags(cmd)
	l.addFlags(cmd)
	return cmd
}

// addFlags adds what acquire has printed.
func (l *holding) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&l.Holder, "holder", "", "holder `id` that acquire printed")
	cmd.Flags().Int64Var(&l.Token, "token", 0, "`token` that acquire printed")
}

// check says which of the two is missing.
func (l *holding) check() error {
	switch {
	case l.Holder == "":
		return usageError{errors.New("--holder is missing; pass the id that acquire printed")}
	case l.Token == 0:
		return usageError{errors.New("--token is missing; pass the number that acquire printed")}
	}
	return nil
}

func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }
