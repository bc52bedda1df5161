// Whether a container can be started at all is asked before one is.

package containers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
)

var (
	// ErrNoEngine means that no Docker engine answers.
	ErrNoEngine = errors.New("no Docker engine answers")

	// ErrNoImage means that the engine does not have the image, and could not
	// pull it in time.
	ErrNoImage = errors.New("the image is not there")
)

const (
	enginePatience = 10 * time.Second
	pullPatience   = 60 * time.Second
)

// available makes sure of an engine that has the image.
func available(ctx context.Context, image string) error {
	configure(ctx)
	engine, err := connect(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoEngine, err)
	}
	defer func() { _ = engine.Close() }()
	_, err = engine.ImageInspect(ctx, image)
	if errdefs.IsNotFound(err) {
		err = pull(ctx, engine, image)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoImage, err)
	}
	return nil
}

// connect finds the engine in all the ways that testcontainers knows.
func connect(ctx context.Context) (*testcontainers.DockerClient, error) {
	ctx, cancel := context.WithTimeout(ctx, enginePatience)
	defer cancel()
	return testcontainers.NewDockerClientWithOpts(ctx)
}

// pull pulls the image, once. testcontainers would try for as long as it may,
// which is a minute of silence on a machine without a way to the registry.
func pull(ctx context.Context, engine *testcontainers.DockerClient, image string) error {
	ctx, cancel := context.WithTimeout(ctx, pullPatience)
	defer cancel()
	progress, err := engine.ImagePull(ctx, image, client.ImagePullOptions{})
	if err != nil {
		return err
	}
	return progress.Wait(ctx)
}

// ryukEnv is how testcontainers is told to do without its garbage collector.
// Only this very value does it; "1" means the contrary.
const ryukEnv, ryukOff = "TESTCONTAINERS_RYUK_DISABLED", "true"

// configure prepares testcontainers, which reads its configuration once per
// process. Its garbage collector is a container too: where that one's image is
// not local it would have to be pulled first, and we do remove our container
// ourselves. Its log is left out: we say what there is to say in one line.
var configure = func() func(context.Context) {
	var once sync.Once
	return func(ctx context.Context) {
		once.Do(func() {
			log.SetDefault(log.NewNoopLogger())
			if os.Getenv(ryukEnv) == "" && !haveRyuk(ctx) {
				// Fails only for a malformed name.
				_ = os.Setenv(ryukEnv, ryukOff)
			}
		})
	}
}()

// haveRyuk says whether the garbage collector's image is local. It does not ask
// through testcontainers, which would read the configuration that depends on
// the answer. If in doubt, it is not.
func haveRyuk(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, enginePatience)
	defer cancel()
	engine, err := client.New(client.FromEnv)
	if err != nil {
		return false
	}
	defer func() { _ = engine.Close() }()
	_, err = engine.ImageInspect(ctx, testcontainers.ReaperDefaultImage) //nolint:staticcheck // deprecated, but nothing else tells which image would be pulled
	return err == nil
}
