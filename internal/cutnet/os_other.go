//go:build !linux

package cutnet

import (
	"errors"
	"os"
)

func newNamespace() (*os.File, error) { return nil, errors.ErrUnsupported }
func enter(*os.File) error            { return errors.ErrUnsupported }
