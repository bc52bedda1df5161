package main

import (
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
		return fmt.Sprintf("%q is just being acquired by somebody else", e.key)
	}
	return fmt.Sprintf("%q is held by %s for up to %s", e.key, e.holder, brief(e.remaining))
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
	var ttl, wait time.Duration
	cmd := &cobra.Command{
		Use:   "acquire KEY",
		Short: "Take a lease, and print its token and holder",
		Long: `Take a lease for a script, and print its fencing token and its holder id. It lasts
for --ttl, whatever becomes of this process; extend it in time, and release it:

  lease=$(pgxlock acquire nightly --ttl 5m) || exit
  read -r token holder <<< "$lease"
  ...
  pgxlock release nightly --holder "$holder" --token "$token"

If somebody else has it, it exits with 75: at once, or after --wait. Ended by a
signal it leaves no lease behind, unless --holder was given: release that one.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkWait(wait); err != nil {
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
				l, err := acquire(ctx, pool, statement("acquire", schema), args[0], holder, ttl, wait, string(quoted))
				switch {
				case err != nil:
					return err
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
	t.addFlags(cmd.Flags())
	output.addFlag(cmd)
	cmd.Flags().DurationVar(&ttl, "ttl", time.Minute, "how long the lease lasts unless it is extended")
	cmd.Flags().DurationVar(&wait, "wait", 0, "how long to wait for somebody else's lease; 0 tries once")
	cmd.Flags().StringVar(&holder, "holder", "", "holder `id`; who has the same one is the same holder (default: a new one)")
	cmd.Flags().StringVar(&metadata, "metadata", "", "`text` for operators to see")
	return cmd
}

// checkWait says what is wrong with a --wait.
func checkWait(wait time.Duration) error {
	if wait < 0 {
		return fmt.Errorf("--wait is %s, it must be 0, which tries once, or more", wait)
	}
	return nil
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
			return conn.QueryRow(context.WithoutCancel(ctx), sql, key, holder, ttl.Seconds(), metadata).
				Scan(&acquired, &l.Token, &heldBy, &expires, &remaining)
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
		case <-time.After(min(pause/2+rands.N(pause/2), left)): // jitter: waiters shall not ask in step
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// release gives a lease back, and tells whether it was live.
func release(ctx context.Context, pool *pgxpool.Pool, schema string, l *holding) (live bool, err error) {
	err = pool.QueryRow(ctx, statement("release", schema), l.Key, l.Holder, l.Token).Scan(&live)
	return live, err
}

func newExtend() *cobra.Command {
	var t target
	var output format
	var l holding
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "extend KEY --holder ID --token N",
		Short: "Let a lease last for its ttl from now",
		Long:  `Let a lease last for --ttl from now, and print when that is over. If it is lost, exit with 80.`,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l.Key = args[0]
			if err := l.check(); err != nil {
				return err
			}
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				var expires *time.Time
				if err := pool.QueryRow(ctx, statement("extend", schema), l.Key, l.Holder, l.Token, ttl.Seconds()).Scan(&expires); err != nil {
					return err
				}
				if expires == nil {
					return fmt.Errorf("%q: %w", l.Key, errLost)
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
	t.addFlags(cmd.Flags())
	output.addFlag(cmd)
	l.addFlags(cmd)
	cmd.Flags().DurationVar(&ttl, "ttl", time.Minute, "how long the lease lasts from now")
	return cmd
}

func newRelease() *cobra.Command {
	var t target
	var l holding
	cmd := &cobra.Command{
		Use:   "release KEY --holder ID --token N",
		Short: "Give a lease back",
		Long: `Give a lease back. If it had lapsed before, exit with 80: somebody else may have had
it meanwhile. While a transaction that fenced it is open, exit with 75.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l.Key = args[0]
			if err := l.check(); err != nil {
				return err
			}
			return t.inDatabase(cmd.Context(), func(ctx context.Context, pool *pgxpool.Pool, schema string) error {
				live, err := release(ctx, pool, schema, &l)
				if err == nil && !live {
					err = fmt.Errorf("%q: %w: it had expired, or was released or taken over", l.Key, errLost)
				}
				return err
			})
		},
	}
	t.addFlags(cmd.Flags())
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
		return usageError{errors.New("--holder is missing: the id that acquire printed")}
	case l.Token == 0:
		return usageError{errors.New("--token is missing: the number that acquire printed")}
	}
	return nil
}
