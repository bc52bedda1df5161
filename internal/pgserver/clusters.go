// Servers that are started one after the other share the work of initdb.

package pgserver

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Clusters copies new clusters instead of making each: initdb costs most of a second of
// a processor, and a copy a twentieth of that. All copies have one system identifier,
// as a cluster and its standbys have. The zero value is ready for use.
type Clusters struct {
	mu   sync.Mutex
	made map[string]*Server // never launched; by the programs and the arguments of initdb
}

// copyTo copies a cluster to a server that has none. The first one makes it.
func (c *Clusters) copyTo(ctx context.Context, s *Server) error {
	first, err := c.first(ctx, Config{Binaries: s.cfg.Binaries, InitdbArgs: s.cfg.InitdbArgs})
	if err != nil {
		return err
	}
	s.password = first.password // it is part of what is copied
	return run(ctx, s.dir.data(), s.as, "cp", "-Rp", first.dir.data()+"/.", s.dir.data())
}

func (c *Clusters) first(ctx context.Context, cfg Config) (*Server, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := fmt.Sprintf("%s %q", cfg.Binaries.Dir, cfg.InitdbArgs)
	if s := c.made[key]; s != nil {
		return s, nil
	}
	s, err := prepareServer(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.initdb(ctx); err != nil {
		return nil, errors.Join(err, s.dir.remove())
	}
	if c.made == nil {
		c.made = make(map[string]*Server)
	}
	c.made[key] = s
	return s, nil
}

// Remove removes what is copied. Servers that were started with it go on.
func (c *Clusters) Remove() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, s := range c.made {
		errs = append(errs, s.dir.remove())
	}
	clear(c.made)
	return errors.Join(errs...)
}
