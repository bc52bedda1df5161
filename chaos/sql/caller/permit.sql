SELECT acquired, coalesce(permits[1], ''), coalesce(fencing_tokens[1], 0), ticket, ask_again_ms FROM acquire_permits_in_turn($1, $2, $5, 1, $3, $4)
