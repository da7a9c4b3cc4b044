//! Responses of an API server during a fault.

use serde_json::json;

use crate::conductor::Health;
use crate::plan::ServerFault;

pub(super) fn health_during(fault: ServerFault) -> Health {
    match fault {
        ServerFault::FailingJobs => Health::Up,
        ServerFault::Down => Health::Down,
        ServerFault::Hangs => Health::Hangs,
        ServerFault::EmptyLists => Health::EmptyLists,
        ServerFault::CutBodies => Health::CutBodies,
        ServerFault::TooManyRequests => status_response(
            429,
            "TooManyRequests",
            "too many requests, please try again later",
        ),
        ServerFault::InternalError => status_response(
            500,
            "InternalError",
            "Internal error occurred: etcdserver: request timed out",
        ),
        ServerFault::Unavailable => status_response(
            503,
            "ServiceUnavailable",
            "the server is currently unable to handle the request",
        ),
        ServerFault::Unauthorized => status_response(401, "Unauthorized", "Unauthorized"),
        ServerFault::Forbidden => status_response(403, "Forbidden", "access denied"),
        ServerFault::NotFound => status_response(
            404,
            "NotFound",
            "the server could not find the requested resource",
        ),
        ServerFault::Gone => status_response(410, "Expired", "too old resource version"),
        ServerFault::Html => html_response(200, "Please log in"),
        ServerFault::BadGateway => html_response(502, "502 Bad Gateway"),
    }
}

fn status_response(code: u16, reason: &str, message: &str) -> Health {
    let body = json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    });
    Health::RespondsWith {
        code,
        content_type: "application/json",
        body: body.to_string(),
        retry_after: (code == 429).then_some(1),
    }
}

fn html_response(code: u16, text: &str) -> Health {
    Health::RespondsWith {
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
            let Health::RespondsWith {
                code: response_code,
                body,
                ..
            } = health_during(fault)
            else {
                panic!("{fault:?} answers nothing");
            };
            assert_eq!(response_code, code);
            let body: serde_json::Value = serde_json::from_str(&body).unwrap();
            assert_eq!(body["code"], code);
        }
        assert_eq!(health_during(ServerFault::Down), Health::Down);
    }
}
