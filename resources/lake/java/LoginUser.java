package pgsieve.lake;

import java.lang.instrument.Instrumentation;
import org.apache.hadoop.security.UserGroupInformation;

/**
 * Tells Hadoop who its user is, before anything asks: a user id without an entry in /etc/passwd, as some platforms give to
 * containers, has no name, and Java's own module for logging in takes none for an error.
 */
public final class LoginUser {
    private LoginUser() {}

    public static void premain(String name, Instrumentation instrumentation) {
        UserGroupInformation.setLoginUser(UserGroupInformation.createRemoteUser(name));
    }
}
