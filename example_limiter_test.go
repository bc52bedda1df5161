package pgxlock_test

import (
	"errors"
	"fmt"
	"log"
	"math"
	"net/http"
	"time"

	"github.com/pgxlock/pgxlock"
)

var limiter *pgxlock.Limiter

// Ten requests per second of each user, and up to twenty at once, however many servers
// there are.
func ExampleNewLimiter() {
	limiter, err := pgxlock.NewLimiter(pool, 10, 20, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx)

	if ok, err := limiter.Allow(ctx, "api:alice"); err == nil && !ok {
		log.Print("too many requests")
	}
}

// Five calls per minute of a service that is shared by all processes.
func ExampleLimiter_Wait() {
	limiter, err := pgxlock.NewLimiter(pool, pgxlock.Every(12*time.Second), 1, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx)

	if err := limiter.Wait(ctx, "partner-api", pgxlock.MaxWait(time.Minute)); err != nil {
		log.Print(err) // ErrLimited: so many wait that it would be more than a minute
		return
	}
	_ = buildReport(ctx)
}

// A middleware that says when to come back.
func ExampleLimiter_Reserve() {
	limited := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, err := limiter.Reserve(r.Context(), "api:"+r.Header.Get("X-API-Key"), pgxlock.NoWait)
			if e, ok := errors.AsType[*pgxlock.Error](err); ok && errors.Is(err, pgxlock.ErrLimited) {
				w.Header().Set("Retry-After", fmt.Sprint(math.Ceil(e.RetryAfter.Seconds())))
				http.Error(w, "too many requests", http.StatusTooManyRequests)
				return
			}
			if err != nil { // the server is away: here it lets them in
				log.Print(err)
			}
			next.ServeHTTP(w, r)
		})
	}
	http.Handle("/", limited(http.NotFoundHandler()))
}

func ExampleNewMemoryLimiter() {
	limiter, err := pgxlock.NewMemoryLimiter(pgxlock.Every(time.Hour), 2)
	if err != nil {
		log.Fatal(err)
	}
	for range 3 {
		fmt.Println(limiter.Allow(ctx, "alice"))
	}
	r, _ := limiter.Reserve(ctx, "alice")
	fmt.Println(r.Delay().Round(time.Minute))
	// Output:
	// true <nil>
	// true <nil>
	// false <nil>
	// 1h0m0s
}

// What a wait of a program's own, or a Locker's, takes between its tries.
func ExampleExponentialBackoff() {
	locks, err := pgxlock.NewLease(pool, &pgxlock.LeaseConfig{Backoff: pgxlock.ExponentialBackoff(50*time.Millisecond, 5*time.Second)})
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close(ctx)
}
