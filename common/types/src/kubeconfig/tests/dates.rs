//! Tests for the validity period of a kubeconfig.

use super::*;

fn at(date: &str) -> Timestamp {
    date.parse().unwrap()
}

fn jwt(claims: &Value) -> String {
    use base64::Engine as _;
    let claims = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(claims.to_string());
    format!("e30.{claims}.c2ln")
}

fn for_user(user: Value) -> SanitizedKubeconfig {
    with_strict_policy("/users/0/user", user).unwrap()
}

fn certificate() -> Value {
    json!({ "client-certificate-data": ISSUED.certificate, "client-key-data": ISSUED.key })
}

#[test]
fn a_client_certificate_is_good_within_its_dates() {
    let sanitized = for_user(certificate());
    assert_eq!(sanitized.not_before, Some(at("2026-01-01T00:00:00Z")));
    assert_eq!(sanitized.expires, Some(at("2027-01-01T00:00:00Z")));
    assert_eq!(sanitized.check_dates(at("2026-06-01T00:00:00Z")), Ok(()));
    let error = sanitized
        .check_dates(at("2027-01-02T00:00:00Z"))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "users[0].user.client-certificate-data expired on 2027-01-01T00:00:00Z: replace the \
         kubeconfig with a newer one"
    );
    assert_eq!(error.reason(), "KubeconfigInvalid");
    let error = sanitized
        .check_dates(at("2025-12-01T00:00:00Z"))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "users[0].user.client-certificate-data is not valid before 2026-01-01T00:00:00Z, and the local time \
         is 2025-12-01T00:00:00Z; wait, or correct the clock"
    );
}

#[test]
fn clocks_that_are_ten_minutes_apart_refuse_nothing() {
    let sanitized = for_user(certificate());
    for (now, is_valid) in [
        ("2025-12-31T23:49:59Z", false),
        ("2025-12-31T23:50:00Z", true),
        ("2027-01-01T00:10:00Z", true),
        ("2027-01-01T00:10:01Z", false),
    ] {
        assert_eq!(sanitized.check_dates(at(now)).is_ok(), is_valid, "{now}");
    }
}

#[test]
fn token_expires_at_its_claim() {
    let sanitized = for_user(json!({ "token": jwt(&json!({ "exp": 1_800_000_000 })) }));
    assert_eq!(sanitized.expires, Some(at("2027-01-15T08:00:00Z")));
    assert_eq!(sanitized.not_before, None);
    let error = sanitized
        .check_dates(at("2028-01-01T00:00:00Z"))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("users[0].user.token expired on 2027-01-15T08:00:00Z"),
        "{error}"
    );
    let opaque = for_user(json!({ "token": "opaque" }));
    assert_eq!((opaque.not_before, opaque.expires), (None, None));
    assert_eq!(opaque.check_dates(at("2999-01-01T00:00:00Z")), Ok(()));
}

/// An API server accepts any valid credential.
#[test]
fn expiry_follows_longest_valid_credential() {
    let mut user = certificate();
    user["token"] = json!(jwt(&json!({ "exp": 1_800_000_000 })));
    let sanitized = for_user(user.clone());
    assert_eq!(sanitized.expires, Some(at("2027-01-15T08:00:00Z")));
    assert_eq!(sanitized.check_dates(at("2027-01-10T00:00:00Z")), Ok(()));
    assert!(sanitized.check_dates(at("2027-02-01T00:00:00Z")).is_err());
    user["token"] = json!("opaque");
    let sanitized = for_user(user);
    assert_eq!(sanitized.expires, None);
    assert_eq!(sanitized.check_dates(at("2999-01-01T00:00:00Z")), Ok(()));
}

#[test]
fn accepted_exec_credential_never_expires() {
    let mut user = certificate();
    user["exec"] = json!({ "command": "/bin/true" });
    let sanitized = with("/users/0/user", user, policy_with("exec")).unwrap();
    assert_eq!(sanitized.check_dates(at("2999-01-01T00:00:00Z")), Ok(()));
}
