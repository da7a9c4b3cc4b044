//! What an API server answers during a fault.

use serde_json::json;

use crate::conductor::Health;
use crate::plan::ServerFault;

pub(super) fn health(fault: ServerFault) -> Health {
    match fault {
        ServerFault::FailingJobs => Health::Up,
        ServerFault::Down => Health::Down,
        ServerFault::Hangs => Health::Hangs,
        ServerFault::EmptyLists => Health::EmptyLists,
        ServerFault::CutBodies => Health::CutBodies,
        ServerFault::TooManyRequests => status(
            429,
            "TooManyRequests",
            "too many requests, please try again later",
        ),
        ServerFault::InternalError => status(
            500,
            "InternalError",
            "Internal error occurred: etcdserver: request timed out",
        ),
        ServerFault::Unavailable => status(
            503,
            "ServiceUnavailable",
            "the server is currently unable to handle the request",
        ),
        ServerFault::Unauthorized => status(401, "Unauthorized", "Unauthorized"),
        ServerFault::Forbidden => status(403, "Forbidden", "access denied"),
        ServerFault::NotFound => status(
            404,
            "NotFound",
            "the server could not find the requested resource",
        ),
        ServerFault::Gone => status(410, "Expired", "too old resource version"),
        ServerFault::Html => page(200, "Please log in"),
        ServerFault::BadGateway => page(502, "502 Bad Gateway"),
    }
}

fn status(code: u16, reason: &str, message: &str) -> Health {
    let body = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    });
    Health::Answers {
        code,
        content_type: "application/json",
        body: body.to_string(),
        retry_after: (code == 429).then_some(1),
    }
}

fn page(code: u16, text: &str) -> Health {
    Health::Answers {
        code,
        content_type: "text/html",
        body: format!("<html><body>{text}</body></html>"),
        retry_after: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_answers_are_status_objects_except_html() {
        for (fault, code) in [
            (ServerFault::TooManyRequests, 429),
            (ServerFault::InternalError, 500),
            (ServerFault::Unavailable, 503),
            (ServerFault::Unauthorized, 401),
            (ServerFault::Forbidden, 403),
            (ServerFault::NotFound, 404),
            (ServerFault::Gone, 410),
        ] {
            let Health::Answers {
                code: given, body, ..
            } = health(fault)
            else {
                panic!("{fault:?} answers nothing");
            };
            assert_eq!(given, code);
            let body: serde_json::Value = serde_json::from_str(&body).unwrap();
            assert_eq!(body["code"], code);
        }
        assert_eq!(health(ServerFault::Down), Health::Down);
    }
}
