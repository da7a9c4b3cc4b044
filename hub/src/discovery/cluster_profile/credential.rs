//! Parses the output of an access provider's program: a credential and its expiry time. Pure.

use jiff::Timestamp;
use serde_json::Value;
use x509_parser::pem::Pem;

use super::provider_file::ApiVersion;

/// A credential. It has at least one of token and certificate.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Credential {
    pub token: Option<String>,
    /// Certificate and key, in PEM.
    pub certificate: Option<(String, String)>,
    /// The earlier of the program's expiry time and that of the certificate.
    pub expires: Option<Timestamp>,
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credential")
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

/// Parses the standard output of the program. The error completes a sentence about the program, and never includes the
/// output.
pub(crate) fn read(output: &[u8], version: ApiVersion) -> Result<Credential, String> {
    let invalid = |problem: &str| format!("the answer has {problem}");
    let document: Value = serde_json::from_slice(output).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        format!("the answer is not JSON (line {line}, column {column})")
    })?;
    let has =
        |key: &str, expected: &str| document.get(key).and_then(Value::as_str) == Some(expected);
    if !has("kind", "ExecCredential") || !has("apiVersion", version.as_str()) {
        let expected = version.as_str();
        return Err(format!("the answer is not an ExecCredential of {expected}"));
    }
    let status = document.get("status").and_then(Value::as_object);
    let status = status.ok_or_else(|| invalid("no status"))?;
    let text = |key: &str, problem: &str| match status.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(invalid(problem)),
    };
    let token = text("token", "a token that is not a string")?;
    if token
        .as_deref()
        .is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic()))
    {
        return Err(invalid("a token with an invalid character"));
    }
    let certificate = text(
        "clientCertificateData",
        "a certificate that is not a string",
    )?;
    let key = text("clientKeyData", "a key that is not a string")?;
    let certificate = match (certificate, key) {
        (None, None) => None,
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (Some(_), None) => return Err(invalid("a certificate without its key")),
        (None, Some(_)) => return Err(invalid("a key without its certificate")),
    };
    if token.is_none() && certificate.is_none() {
        return Err(invalid("neither a token nor a client certificate"));
    }
    let reported_expiry = text(
        "expirationTimestamp",
        "an expirationTimestamp that is not a string",
    )?
    .map(|text| text.parse::<Timestamp>())
    .transpose()
    .map_err(|_| invalid("an expirationTimestamp that is not an RFC 3339 time"))?;
    let certificate_expiry = certificate.as_ref().and_then(|(pem, _)| not_after(pem));
    Ok(Credential {
        token,
        certificate,
        expires: [reported_expiry, certificate_expiry]
            .into_iter()
            .flatten()
            .min(),
    })
}

/// Expiry time of the first certificate, which is the client's own. The sanitizer rejects an unreadable
/// certificate.
fn not_after(pem: &str) -> Option<Timestamp> {
    let pem = Pem::iter_from_buffer(pem.as_bytes()).next()?.ok()?;
    let certificate = pem.parse_x509().ok()?;
    Timestamp::from_second(certificate.validity().not_after.timestamp()).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_status(status: Value) -> Result<Credential, String> {
        let document = json!({
            "kind": "ExecCredential",
            "apiVersion": "client.authentication.k8s.io/v1",
            "status": status,
        });
        read(document.to_string().as_bytes(), ApiVersion::V1)
    }

    #[test]
    fn token_or_certificate_pair_is_accepted_as_credential() {
        let credential = read_status(json!({"token": "t", "expirationTimestamp": null})).unwrap();
        assert_eq!(credential.token.as_deref(), Some("t"));
        assert_eq!(credential.expires, None);
        let credential = read_status(json!({
            "token": "", "clientCertificateData": "c", "clientKeyData": "k",
            "expirationTimestamp": "2030-01-01T00:00:00Z",
        }));
        let credential = credential.unwrap();
        assert_eq!(credential.token, None);
        assert_eq!(
            credential.certificate,
            Some(("c".to_owned(), "k".to_owned()))
        );
        assert_eq!(credential.expires.unwrap().as_second(), 1_893_456_000);
    }

    #[test]
    fn credential_expires_no_later_than_its_certificate() {
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.not_after = rcgen::date_time_ymd(2029, 1, 1);
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let expires = |timestamp| {
            let status = json!({
                "clientCertificateData": pem, "clientKeyData": "k", "expirationTimestamp": timestamp,
            });
            read_status(status).unwrap().expires.unwrap().to_string()
        };
        assert_eq!(expires(Value::Null), "2029-01-01T00:00:00Z");
        assert_eq!(
            expires(json!("2030-01-01T00:00:00Z")),
            "2029-01-01T00:00:00Z"
        );
        assert_eq!(
            expires(json!("2028-01-01T00:00:00+01:00")),
            "2027-12-31T23:00:00Z"
        );
    }

    #[test]
    fn everything_else_is_refused_and_never_quoted() {
        for (status, expected) in [
            (Value::Null, "no status"),
            (json!({}), "neither"),
            (json!({"token": ["hunter2"]}), "not a string"),
            (json!({"token": "hunter2\n"}), "character"),
            (
                json!({"clientCertificateData": "hunter2"}),
                "without its key",
            ),
            (
                json!({"clientKeyData": "hunter2"}),
                "without its certificate",
            ),
            (
                json!({"token": "hunter2", "expirationTimestamp": "hunter2"}),
                "RFC 3339",
            ),
        ] {
            let error = read_status(status).unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        for text in [
            "",
            "hunter2",
            "{\"kind\": \"ExecCredential\"} hunter2",
            "\u{0}",
        ] {
            let error = read(text.as_bytes(), ApiVersion::V1).unwrap_err();
            assert!(error.contains("not JSON"), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        let other = json!({
            "kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1beta1",
            "status": {"token": "t"},
        });
        let error = read(other.to_string().as_bytes(), ApiVersion::V1).unwrap_err();
        assert!(error.ends_with(ApiVersion::V1.as_str()), "{error}");
        assert!(read(other.to_string().as_bytes(), ApiVersion::V1beta1).is_ok());
    }
}
