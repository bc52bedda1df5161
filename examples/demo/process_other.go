//go:build !unix

package main

import (
	"errors"
	"os/exec"
)

// There is no server for the demonstration on these systems, so it never gets here.

func apart(*exec.Cmd)                  {}
func (p *workerProcess) freeze() error { return errors.ErrUnsupported }
func (p *workerProcess) thaw() error   { return errors.ErrUnsupported }
