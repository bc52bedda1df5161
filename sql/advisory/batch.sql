EXECUTE "pgxlock_batch /* session */"('{/* what */}', '{/* keys */}')
