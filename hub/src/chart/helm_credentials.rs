//! Reads the credentials of the chart repository from Helm's own files.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use anyhow::bail;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use krypton_helm::chart::{Credentials, CredentialsError};
use krypton_runtime::periodic::file::{FileError, SettingsFile};
use serde::Deserialize;

use crate::args::HelmCredentials;

/// A repository as `helm repo add` writes it.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Repository {
    url: String,
    username: String,
    password: String,
    cert_file: String,
    key_file: String,
    ca_file: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Repositories {
    repositories: Vec<Repository>,
}

/// Reads the credentials of the repository `url` once. `None` if the file has none for it.
///
/// # Errors
///
/// If the file, or a file that it names, is unreadable or invalid. The error never contains their content.
pub async fn read(credentials: &HelmCredentials, url: &str) -> anyhow::Result<Option<Credentials>> {
    let (file, data) = match credentials {
        HelmCredentials::Registry(path) => {
            let file = SettingsFile {
                name: "registry file of Helm",
                flag: HelmCredentials::REGISTRY,
                path: path.clone(),
            };
            let content = read_if_present(&file).await?;
            let login = content.map(|content| (".dockerconfigjson", content));
            (file, login.into_iter().collect())
        }
        HelmCredentials::Repositories(path) => {
            let file = SettingsFile {
                name: "repositories file of Helm",
                flag: HelmCredentials::REPOSITORIES,
                path: path.clone(),
            };
            let data = repository(&file, url).await?;
            (file, data)
        }
    };
    let data = data.into_iter();
    let data = data.map(|(key, value)| (key.to_owned(), ByteString(value)));
    let secret = Secret {
        data: Some(data.collect::<BTreeMap<_, _>>()),
        ..Secret::default()
    };
    match Credentials::from_secret(&secret) {
        Ok(credentials) => Ok(Some(credentials)),
        Err(CredentialsError::Empty) => Ok(None),
        Err(error) => {
            let SettingsFile { name, flag, path } = file;
            let message = format!("failed to use the {name} {} ({flag})", path.display());
            Err(anyhow::Error::new(error).context(message))
        }
    }
}

/// Reads a file, which Helm itself does without.
async fn read_if_present(file: &SettingsFile) -> Result<Option<Vec<u8>>, FileError> {
    match file.read_with_deadline().await {
        Ok(content) => Ok(Some(content)),
        Err(FileError::Read(_, error)) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the credentials of the repository `url` under the keys of a Secret. Empty ones count as missing.
async fn repository(
    file: &SettingsFile,
    url: &str,
) -> anyhow::Result<Vec<(&'static str, Vec<u8>)>> {
    let Some(content) = read_if_present(file).await? else {
        return Ok(Vec::new());
    };
    let Ok(Repositories { repositories }) = serde_saphyr::from_slice(&content) else {
        let SettingsFile { name, flag, path } = file;
        let path = path.display();
        bail!("the {name} {path} is not what 'helm repo add' writes; correct the file of {flag}");
    };
    let url = url.trim_end_matches('/');
    let mut repositories = repositories.into_iter();
    let Some(entry) = repositories.find(|entry| entry.url.trim_end_matches('/') == url) else {
        return Ok(Vec::new());
    };
    let mut data = vec![
        ("username", entry.username.into_bytes()),
        ("password", entry.password.into_bytes()),
    ];
    for (key, path) in [
        ("tls.crt", entry.cert_file),
        ("tls.key", entry.key_file),
        ("ca.crt", entry.ca_file),
    ] {
        if !path.is_empty() {
            let pem = SettingsFile {
                name: "PEM file of a repository",
                flag: file.flag,
                path: path.into(),
            };
            data.push((key, pem.read_with_deadline().await?));
        }
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use krypton_types::error_chain::chain;

    use super::*;

    const URL: &str = "https://charts.example.org/team";

    fn write(folder: &tempfile::TempDir, content: &str) -> PathBuf {
        let path = folder.path().join("file");
        std::fs::write(&path, content).unwrap();
        path
    }

    #[tokio::test]
    async fn repository_is_found_by_its_url() {
        let folder = tempfile::tempdir().unwrap();
        let ca = folder.path().join("ca.crt");
        std::fs::write(&ca, "a certificate").unwrap();
        let content = format!(
            r#"
apiVersion: ""
generated: "2026-01-13T10:00:00Z"
repositories:
  - {{name: other, url: "https://charts.example.org", username: you, password: b}}
  - {{name: ours, url: "{URL}/", username: me, password: hunter2, caFile: {}, certFile: "", keyFile: "",
      insecure_skip_tls_verify: false, pass_credentials_all: false}}
"#,
            ca.display()
        );
        let file = SettingsFile {
            name: "repositories file of Helm",
            flag: HelmCredentials::REPOSITORIES,
            path: write(&folder, &content),
        };
        let expected = [
            ("username", b"me".to_vec()),
            ("password", b"hunter2".to_vec()),
            ("ca.crt", b"a certificate".to_vec()),
        ];
        assert_eq!(repository(&file, URL).await.unwrap(), expected);
        let unknown = repository(&file, "https://charts.example.org/teams").await;
        assert!(unknown.unwrap().is_empty());
    }

    #[tokio::test]
    async fn credentials_are_read_only_for_their_repository() {
        // Fails if another test has installed the provider.
        drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
        let folder = tempfile::tempdir().unwrap();
        let of_repository = |fields: &str| format!("repositories: [{{url: '{URL}', {fields}}}]");
        let registry: fn(PathBuf) -> HelmCredentials = HelmCredentials::Registry;
        let repositories: fn(PathBuf) -> HelmCredentials = HelmCredentials::Repositories;
        let login = r#"{"auths": {"r.example.org": {"auth": "bWU6aHVudGVyMg=="}}}"#;
        let store = r#"{"auths": {"r.example.org": {}}, "credsStore": "hunter2"}"#;
        let password = of_repository("username: me, password: hunter2");
        let no_password = of_repository("username: hunter2");
        let no_file = of_repository("caFile: /nonexistent/ca.crt");
        let text = "repositories: hunter2";
        for (kind, content, expected) in [
            (registry, login, Ok(true)),
            (registry, r#"{"auths": {}}"#, Ok(false)),
            (registry, "{}", Ok(false)),
            (registry, store, Err("'helm registry login'")),
            (repositories, &password, Ok(true)),
            (repositories, &of_repository("name: public"), Ok(false)),
            (repositories, "repositories: []", Ok(false)),
            (repositories, &no_password, Err("username without password")),
            (repositories, &no_file, Err("/nonexistent/ca.crt")),
            (repositories, text, Err("'helm repo add'")),
        ] {
            let credentials = kind(write(&folder, content));
            let read = read(&credentials, URL).await;
            match (read, expected) {
                (Ok(read), Ok(expected)) => assert_eq!(read.is_some(), expected, "{content}"),
                (Err(error), Err(expected)) => {
                    let text = chain(&*error);
                    assert!(text.contains(expected), "{content}: {text}");
                    assert!(text.contains("HELM_RE"), "{text}");
                    assert!(!text.contains("hunter2"), "{text}");
                }
                (read, _) => panic!("{content}: {read:?}"),
            }
        }
        for kind in [registry, repositories] {
            let missing = kind(folder.path().join("missing"));
            assert!(read(&missing, URL).await.unwrap().is_none());
        }
    }
}
