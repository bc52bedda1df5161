package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// Examples without output are compiled and shown, not run: they need a server.
var (
	ctx     = context.Background()
	pool    *pgxpool.Pool
	limiter *ratelimit.Limiter
)

// Each user may send ten requests per second and up to twenty at once, however many servers
// there are.
func ExampleNew() {
	limiter, err := ratelimit.New(pool, 10, 20, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx)

	if ok, err := limiter.Allow(ctx, "api:alice"); err == nil && !ok {
		log.Print("too many requests")
	}
}

// All processes together call a service at most five times per minute.
func ExampleLimiter_Wait() {
	limiter, err := ratelimit.New(pool, ratelimit.Every(12*time.Second), 1, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx)

	if err := limiter.Wait(ctx, "partner-api", pgxlock.MaxWait(time.Minute)); err != nil {
		log.Print(err) // ratelimit.ErrLimited: the wait would be longer than a minute
		return
	}
	callPartner()
}

// A middleware tells its clients when to try again.
func ExampleLimiter_Reserve() {
	limited := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, err := limiter.Reserve(r.Context(), "api:"+r.Header.Get("X-API-Key"), pgxlock.NoWait)
			if e, ok := errors.AsType[*pgxlock.Error](err); ok && errors.Is(err, ratelimit.ErrLimited) {
				w.Header().Set("Retry-After", fmt.Sprint(math.Ceil(e.RetryAfter.Seconds())))
				http.Error(w, "too many requests", http.StatusTooManyRequests)
				return
			}
			if err != nil { // the database cannot be reached: this program then allows the request
				log.Print(err)
			}
			next.ServeHTTP(w, r)
		})
	}
	http.Handle("/", limited(http.NotFoundHandler()))
}

// A unit test needs no server.
func ExampleNewMemory() {
	limiter, err := ratelimit.NewMemory(ratelimit.Every(time.Hour), 2)
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

func callPartner() {}
